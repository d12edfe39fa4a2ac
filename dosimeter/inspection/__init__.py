"""Models from a stranger: what a client can tell of a model before it trains on it."""
