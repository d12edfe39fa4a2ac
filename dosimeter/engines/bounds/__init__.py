"""What no attacker can do: reconstruction robustness, Bayesian Cramér–Rao bounds, and the directions that an update hides."""
