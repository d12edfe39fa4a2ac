"""AlexNet."""

from __future__ import annotations

from typing import Literal

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import ConvolutionalNetwork, dropout_layer, require_size
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt
from dosimeter.registry import MODELS


@MODELS.register("alexnet")
def alexnet(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    stem: Literal["cifar", "imagenet"] = "cifar",
    hidden: PositiveInt = 4096,
    activation: Activation = "relu",
    dropout: Fraction = 0.0,
    head_bias: bool = True,
    initialisation: Initialisation = "pytorch",
    positive_layers: NonNegativeInt = 0,
) -> ConvolutionalNetwork:
    """AlexNet: five convolutions and three linear layers, from 16 pixels (CIFAR stem) or 63 (ImageNet stem) upwards.

    Krizhevsky, "One Weird Trick for Parallelizing Convolutional Neural Networks", 2014. With the ImageNet stem, from 224 pixels,
    names and shapes are torchvision's, so that its weights load. The CIFAR stem has a 3x3 convolution of stride 2 in the
    place of the 11x11 one of stride 4, and 2x2 poolings in the place of 3x3 ones: 32 pixels do not survive the others.
    Dropout is off unless asked for (torchvision: 0.5), since its masks change the update in train mode from call to call.
    """
    if stem == "imagenet":
        require_size(size, 63)
        first, pooling = nn.Conv2d(channels, 64, 11, stride=4, padding=2), 3
    else:
        require_size(size, 16)
        first, pooling = nn.Conv2d(channels, 64, 3, stride=2, padding=1), 2
    features = nn.Sequential(
        first,
        activation_layer(activation),
        nn.MaxPool2d(pooling, stride=2),
        nn.Conv2d(64, 192, 5, padding=2),
        activation_layer(activation),
        nn.MaxPool2d(pooling, stride=2),
        nn.Conv2d(192, 384, 3, padding=1),
        activation_layer(activation),
        nn.Conv2d(384, 256, 3, padding=1),
        activation_layer(activation),
        nn.Conv2d(256, 256, 3, padding=1),
        activation_layer(activation),
        nn.MaxPool2d(pooling, stride=2),
    )
    side = min(_last_side(size, stem, pooling), 6)
    classifier = nn.Sequential(
        dropout_layer(dropout),
        nn.Linear(256 * side**2, hidden),
        activation_layer(activation),
        dropout_layer(dropout),
        nn.Linear(hidden, hidden),
        activation_layer(activation),
        nn.Linear(hidden, classes, bias=head_bias),
    )
    return initialise(ConvolutionalNetwork(features, side, classifier), initialisation, positive_layers)


def _last_side(size: int, stem: str, pooling: int) -> int:
    """The side of the last maps: behind the first convolution and three poolings."""
    side = (size - 7) // 4 + 1 if stem == "imagenet" else (size + 1) // 2
    for _ in range(3):
        side = (side - pooling) // 2 + 1
    return side
