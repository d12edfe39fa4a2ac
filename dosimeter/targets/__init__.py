"""Registered target recoveries: the numbers that a regression is trained on."""
