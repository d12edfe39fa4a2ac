"""Captures: what one client of a federation sent in one round, as a file."""
