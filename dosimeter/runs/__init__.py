"""What a user starts: an experiment, an audit, a grid of defenses, a reproduced table; and the records."""
