"""What a dishonest server does to a model before it sends it, and how it reads the answer."""
