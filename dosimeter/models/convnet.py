"""The ConvNet of GradFilt."""

from __future__ import annotations

from collections import OrderedDict
from itertools import pairwise

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import require_size
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import PositiveInt
from dosimeter.registry import MODELS


@MODELS.register("convnet")
def convnet(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    width: PositiveInt = 64,
    activation: Activation = "relu",
    head_bias: bool = True,
    initialisation: Initialisation = "pytorch",
) -> nn.Sequential:
    """Eight 3x3 convolutions with batch norm, one max pooling and one linear layer.

    Zhang, "Unveiling the Shadows", PhD thesis, Hong Kong Polytechnic University 2025, Section 5.5.1 (GradFilt). It gives no
    channel widths: these are the ConvNet64's of Geiping et al., "Inverting Gradients", NeurIPS 2020 (1, 2, 2, 4, 4, 4, 4, 4 times
    `width`), which has the same eight convolutions. The pooling, 3x3 as there, follows the last of them, where the thesis
    places it; Geiping et al. pool after the sixth too.
    """
    require_size(size, 3)
    widths = (channels, *(factor * width for factor in (1, 2, 2, 4, 4, 4, 4, 4)))
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for position, (width_in, width_out) in enumerate(pairwise(widths)):
        layers[f"conv{position}"] = nn.Conv2d(width_in, width_out, 3, padding=1)
        layers[f"bn{position}"] = nn.BatchNorm2d(width_out)
        layers[f"activation{position}"] = activation_layer(activation)
    layers |= {"pool": nn.MaxPool2d(3), "flatten": nn.Flatten()}
    layers["linear"] = nn.Linear(widths[-1] * (size // 3) ** 2, classes, bias=head_bias)
    return initialise(nn.Sequential(layers), initialisation)
