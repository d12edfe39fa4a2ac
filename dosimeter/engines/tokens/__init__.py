"""What a gradient tells of the tokens of a text: spans of gradients, and what a tied head adds to an embedding's rows."""
