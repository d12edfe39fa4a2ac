"""One sample's label and feature from one unknown number."""
