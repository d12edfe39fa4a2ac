"""Reading inputs off fully-connected layers."""
