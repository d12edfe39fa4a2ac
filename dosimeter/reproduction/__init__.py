"""The papers' tables: read from TOML, carried out again, and set beside the published numbers."""
