"""Membership tests, one file each. They say which candidates, samples that the server holds itself, are in a client's batch."""
