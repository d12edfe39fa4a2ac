"""MobileNetV2."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import ConvolutionalNetwork, dropout_layer
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import Fraction, PositiveInt
from dosimeter.registry import MODELS

STAGES = (  # expansion, channels, blocks, stride: Table 2 of the paper
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
FEATURES = 1280


class InvertedResidual(nn.Module):
    """Widen by 1x1, filter each channel by 3x3, narrow by 1x1; a shortcut where the shapes allow it."""

    def __init__(self, channels: int, width: int, expansion: int, stride: int, activation: Activation) -> None:
        super().__init__()
        inner = channels * expansion
        widen = [_convolution(channels, inner, 1, 1, 1, activation)] if expansion > 1 else []
        filter_each = _convolution(inner, inner, 3, stride, inner, activation)
        self.conv = nn.Sequential(*widen, filter_each, nn.Conv2d(inner, width, 1, bias=False), nn.BatchNorm2d(width))
        self.shortcut = stride == 1 and channels == width

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs + self.conv(inputs) if self.shortcut else self.conv(inputs)


@MODELS.register("mobilenet_v2")
def mobilenet_v2(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    stem: Literal["cifar", "imagenet"] = "cifar",
    activation: Activation = "relu6",
    dropout: Fraction = 0.0,
    head_bias: bool = True,
    initialisation: Initialisation = "kaiming_gaussian",
) -> ConvolutionalNetwork:
    """MobileNetV2: seventeen inverted residuals with batch norm, 1280 features.

    Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", CVPR 2018. Names and shapes are torchvision's, so
    that its weights load (`stem="imagenet"`); the CIFAR stem leaves out the first two halvings, as Geiping et al.
    ("Inverting Gradients", NeurIPS 2020) do. Dropout is off unless asked for (torchvision: 0.2), since its masks change
    the update in train mode from call to call.
    """
    classifier = nn.Sequential(dropout_layer(dropout), nn.Linear(FEATURES, classes, bias=head_bias))
    network = ConvolutionalNetwork(_features(channels, stem == "cifar", activation), 1, classifier)
    return initialise(network, initialisation)


def _features(channels: int, cifar_stem: bool, activation: Activation) -> nn.Sequential:
    layers: list[nn.Module] = [_convolution(channels, 32, 3, 1 if cifar_stem else 2, 1, activation)]
    received = 32
    for expansion, width, blocks, first_stride in STAGES:
        for index in range(blocks):
            stride = first_stride if index == 0 and not (cifar_stem and width == 24) else 1
            layers.append(InvertedResidual(received, width, expansion, stride, activation))
            received = width
    layers.append(_convolution(received, FEATURES, 1, 1, 1, activation))
    return nn.Sequential(*layers)


def _convolution(channels: int, width: int, kernel: int, stride: int, groups: int, activation: Activation) -> nn.Sequential:
    convolution = nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
    return nn.Sequential(convolution, nn.BatchNorm2d(width), activation_layer(activation))
