"""The network of the default audit."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import PositiveInt
from dosimeter.registry import MODELS


@MODELS.register("small_cnn")
def small_cnn(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    width: PositiveInt = 16,
    activation: Activation = "sigmoid",
    head_bias: bool = True,
    initialisation: Initialisation | None = None,
) -> nn.Sequential:
    """A small CNN for images of 8 to 64 pixels: three 3x3 convolutions, the last two with stride 2, and one linear layer.

    Ours, made for the default audit: it trains in seconds on two cores, and is of the kind (strides in place of pooling,
    no batch norm) that Zhu, Liu and Han attack in "Deep Leakage from Gradients", NeurIPS 2019. Where no initialisation is
    given, it is kaiming, and xavier with sigmoids, which learn nothing for many epochs from kaiming's smaller weights.
    """
    side = -(-size // 4)
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, width, 3, padding=1),
            activation1=activation_layer(activation),
            conv2=nn.Conv2d(width, 2 * width, 3, stride=2, padding=1),
            activation2=activation_layer(activation),
            conv3=nn.Conv2d(2 * width, 2 * width, 3, stride=2, padding=1),
            activation3=activation_layer(activation),
            flatten=nn.Flatten(),
            fc=nn.Linear(2 * width * side**2, classes, bias=head_bias),
        )
    )
    return initialise(network, initialisation or ("xavier" if activation == "sigmoid" else "kaiming"))
