"""VGG networks."""

from __future__ import annotations

from collections.abc import Callable

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import ConvolutionalNetwork, dropout_layer, register_member, require_size
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt

WIDTHS = (64, 128, 256, 512, 512)  # channels of the stages, each of which ends in a 2x2 max pooling


def _vgg(layers: int, convolutions: tuple[int, ...]) -> Callable[..., ConvolutionalNetwork]:
    @register_member(
        f"vgg{layers}",
        f"""VGG-{layers}: {sum(convolutions)} convolutions of 3x3 in five stages and three linear layers, from 32 pixels upwards.

        Simonyan and Zisserman, "Very Deep Convolutional Networks for Large-Scale Image Recognition", ICLR 2015. From 224 pixels
        names and shapes are torchvision's, so that its weights load (with `batch_norm`, those of its `_bn` networks). Below,
        the last maps are not blown up to 7x7: at 32 pixels the linear layers receive 512 features, as in Ma et al. (iLRG, ICLR
        2023), who use batch norm. Dropout is off unless asked for (torchvision: 0.5), since its masks change the update in
        train mode from call to call.
        """,
    )
    def build(
        *,
        classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        size: PositiveInt = 32,
        batch_norm: bool = False,
        hidden: PositiveInt = 4096,
        activation: Activation = "relu",
        dropout: Fraction = 0.0,
        head_bias: bool = True,
        initialisation: Initialisation = "kaiming_gaussian",
        positive_layers: NonNegativeInt = 0,
    ) -> ConvolutionalNetwork:
        require_size(size, 32)
        side = min(size // 32, 7)
        classifier = nn.Sequential(
            nn.Linear(WIDTHS[-1] * side**2, hidden),
            activation_layer(activation),
            dropout_layer(dropout),
            nn.Linear(hidden, hidden),
            activation_layer(activation),
            dropout_layer(dropout),
            nn.Linear(hidden, classes, bias=head_bias),
        )
        network = ConvolutionalNetwork(_features(channels, convolutions, batch_norm, activation), side, classifier)
        return initialise(network, initialisation, positive_layers)

    return build


def _features(channels: int, convolutions: tuple[int, ...], batch_norm: bool, activation: Activation) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, count in zip(WIDTHS, convolutions):
        for _ in range(count):
            layers.append(nn.Conv2d(channels, width, 3, padding=1))
            if batch_norm:
                layers.append(nn.BatchNorm2d(width))
            layers.append(activation_layer(activation))
            channels = width
        layers.append(nn.MaxPool2d(2))
    return nn.Sequential(*layers)


vgg11 = _vgg(11, (1, 1, 2, 2, 2))
vgg13 = _vgg(13, (2, 2, 2, 2, 2))
vgg16 = _vgg(16, (2, 2, 3, 3, 3))
vgg19 = _vgg(19, (2, 2, 4, 4, 4))
