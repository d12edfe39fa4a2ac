"""From exact maps down the network: the layers below by least squares, the inputs by Gauss-Newton."""
