"""Activation maps from a convolution's gradient, which is a set of shift operators in disguise."""
