from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


@pytest.mark.parametrize(("size", "features"), [(32, 512), (64, 512 * 4), (224, 512 * 49), (256, 512 * 49)])
def test_the_linear_layers_receive_what_ilrg_and_torchvision_state(size: int, features: int) -> None:
    with torch.device("meta"):
        assert MODELS.build("vgg16", size=size).classifier[0].in_features == features


@pytest.mark.parametrize(("name", "convolutions"), [("vgg11", 8), ("vgg13", 10), ("vgg16", 13), ("vgg19", 16)])
def test_batch_norm_follows_every_convolution(name: str, convolutions: int) -> None:
    with torch.device("meta"):
        layers = list(MODELS.build(name, batch_norm=True).features)
    following = [type(after) for layer, after in pairwise(layers) if isinstance(layer, nn.Conv2d)]
    assert following == [nn.BatchNorm2d] * convolutions


def test_forward_is_the_formula() -> None:
    torch.manual_seed(4)
    model = MODELS.build("vgg11", channels=1, hidden=6, classes=3)
    maps = inputs = torch.randn(2, 1, 32, 32)
    for layer in model.features:
        if isinstance(layer, nn.Conv2d):
            maps = conv2d(maps, layer.weight, layer.bias, padding=1).clamp(min=0)
        elif isinstance(layer, nn.MaxPool2d):
            maps = max_pool2d(maps, 2)
    values = maps.reshape(2, 512)
    for position in (0, 3):
        values = (values @ model.classifier[position].weight.T + model.classifier[position].bias).clamp(min=0)
    assert torch.allclose(model(inputs), values @ model.classifier[6].weight.T + model.classifier[6].bias, rtol=1e-4, atol=1e-9)


def test_mnist_is_refused_at_its_own_size() -> None:
    with pytest.raises(OptionError, match=r"model\.size: expected at least 32 pixels"):
        MODELS.build("vgg11", size=28, channels=1)
