"""One sample's label and feature, found by solving for one unknown number."""
