"""Takes the gradient of a linear layer apart into the samples that it is a sum of."""
