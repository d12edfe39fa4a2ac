"""Gradient matching: inputs whose update is the one that was sent."""
