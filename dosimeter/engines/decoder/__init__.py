"""Networks that draw pictures from features."""
