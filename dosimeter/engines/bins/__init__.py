"""Layers that a dishonest server plants, and what their bins held."""
