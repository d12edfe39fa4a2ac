"""What can be computed from a gradient in closed form: layers walked back, rows divided, one scalar found."""
