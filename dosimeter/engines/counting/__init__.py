"""From gradients to whole numbers of samples per class."""
