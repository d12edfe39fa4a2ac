"""Token recoveries, one a file."""
