"""Limits on every attacker, one a file."""
