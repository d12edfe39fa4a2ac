"""Map recoveries, one file each. They recover the activation maps at the input of a convolution."""
