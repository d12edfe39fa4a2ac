"""The papers' tables, carried out again."""
