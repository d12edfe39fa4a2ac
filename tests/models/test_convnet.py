from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import conv2d, max_pool2d

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


def test_ten_layers_with_the_widths_of_convnet64() -> None:
    with torch.device("meta"):
        model = MODELS.build("convnet")
    convolutions = [layer for layer in model if isinstance(layer, nn.Conv2d)]
    assert [layer.out_channels for layer in convolutions] == [64, 128, 128, 256, 256, 256, 256, 256]
    assert all(layer.kernel_size == (3, 3) and layer.padding == (1, 1) for layer in convolutions)
    assert sum(isinstance(layer, nn.BatchNorm2d) for layer in model) == 8
    assert [type(layer) for layer in model][-3:] == [nn.MaxPool2d, nn.Flatten, nn.Linear]
    assert sum(isinstance(layer, nn.MaxPool2d) for layer in model) == 1
    assert model.linear.in_features == 256 * 10 * 10


def test_forward_is_the_formula_with_batch_statistics() -> None:
    model = MODELS.build("convnet", channels=1, size=7, width=2).double().train()
    inputs = torch.randn(4, 1, 7, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    s, maps = model.state_dict(), inputs
    for i in range(8):
        maps = conv2d(maps, s[f"conv{i}.weight"], s[f"conv{i}.bias"], padding=1)
        mean, variance = maps.mean((0, 2, 3), keepdim=True), maps.var((0, 2, 3), keepdim=True, correction=0)
        maps = ((maps - mean) / (variance + 1e-5).sqrt()).clamp(min=0)  # a fresh batch norm has weight 1 and bias 0
    expected = max_pool2d(maps, 3).reshape(4, -1) @ s["linear.weight"].T + s["linear.bias"]
    assert torch.allclose(model(inputs), expected, rtol=1e-8, atol=1e-10)


def test_a_width_that_is_no_number_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.width: expected an int, got '64'"):
        MODELS.build("convnet", width="64")
