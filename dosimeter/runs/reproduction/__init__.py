"""Published tables, reproduced."""
