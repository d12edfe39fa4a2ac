"""What a client can tell of a model that it receives, before it trains on it."""
