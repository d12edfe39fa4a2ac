"""What can leak: each surface owns its score, nulls, verdict, headline and words."""
