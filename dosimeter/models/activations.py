"""The non-linearities that the architectures offer, none of them in place, so that gradients of gradients exist."""

from __future__ import annotations

from typing import Literal

from torch import nn

Activation = Literal["relu", "relu6", "leaky_relu", "elu", "selu", "swish", "tanh", "sigmoid"]

_LAYERS: dict[Activation, type[nn.Module]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "leaky_relu": nn.LeakyReLU,
    "elu": nn.ELU,
    "selu": nn.SELU,
    "swish": nn.SiLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
}


def activation_layer(name: Activation) -> nn.Module:
    return _LAYERS[name]()
