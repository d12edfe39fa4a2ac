"""How the papers draw the weights of an untrained network."""

from __future__ import annotations

from typing import Literal, TypeVar

from torch import nn

from dosimeter.options import mismatch

Initialisation = Literal["kaiming", "kaiming_gaussian", "kaiming_fan_in", "xavier", "pytorch", "uniform"]
"""kaiming: convolutions N(0, 2 / fan out), the rest as PyTorch draws it; torchvision's ResNets, iLRG's networks.
kaiming_gaussian: the same, with linear layers N(0, 0.01²) and zero biases; torchvision's VGG and MobileNetV2.
kaiming_fan_in: convolutions and linear layers N(0, 2 / fan in); the CIFAR ResNets.
xavier: convolutions N(0, 16 · 2 / (fan in + fan out)), the rest as PyTorch draws it; for sigmoids, whose slope is 1/4 at most.
pytorch: as PyTorch draws each layer.
uniform: every weight and bias U(-0.5, 0.5); Deep Leakage from Gradients.
"""

Network = TypeVar("Network", bound=nn.Module)


def initialise(network: Network, scheme: Initialisation, positive_layers: int = 0) -> Network:
    """Draw the weights of `network` in place by `scheme`, the last `positive_layers` by `_draw_positive`; return it."""
    weighted = [layer for layer in network.modules() if isinstance(layer, (nn.Conv2d, nn.Linear))]
    if positive_layers > len(weighted):
        raise mismatch("positive_layers", f"at most the {len(weighted)} layers that have weights", positive_layers)
    if scheme == "uniform":
        for parameter in network.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)
    elif scheme != "pytorch":
        for layer in weighted:
            _draw(layer, scheme)
    for layer in weighted[len(weighted) - positive_layers :]:
        _draw_positive(layer)
    return network


def _draw(layer: nn.Conv2d | nn.Linear, scheme: Initialisation) -> None:
    convolution = isinstance(layer, nn.Conv2d)
    if scheme == "kaiming_fan_in":
        nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
    elif scheme == "xavier" and convolution:
        nn.init.xavier_normal_(layer.weight, gain=4)
    elif scheme in ("kaiming", "kaiming_gaussian") and convolution:
        nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    elif scheme == "kaiming_gaussian":
        nn.init.normal_(layer.weight, 0, 0.01)
    if scheme == "kaiming_gaussian" and layer.bias is not None:
        nn.init.zeros_(layer.bias)


def _draw_positive(layer: nn.Conv2d | nn.Linear) -> None:
    """Weights U(0.01, 0.2), as GDBR draws the layers next to the output (Zhang's thesis, Section 4.5.1), without biases."""
    nn.init.uniform_(layer.weight, 0.01, 0.2)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
