"""What a model is made of: its head, its chain of layers, its input's shape, and what passes through it."""
