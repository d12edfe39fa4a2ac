"""The mathematics that the methods share. An engine knows no defense, no surface and no method by name."""
