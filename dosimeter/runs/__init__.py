"""What a user runs: an experiment, an audit, a grid of defenses, or a published table."""
