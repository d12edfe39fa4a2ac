from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("channels", "size", "flattened"), [(1, 28, 256), (3, 32, 400), (1, 16, 16)])
def test_lenet5_flattens_to_what_ilrg_states(channels: int, size: int, flattened: int) -> None:
    model = MODELS.build("lenet5", channels=channels, size=size)
    assert tuple(model.fc1.weight.shape) == (120, flattened)
    assert model(torch.rand(2, channels, size, size)).shape == (2, 10)


def test_lenet5_has_the_classic_number_of_parameters() -> None:
    assert sum(p.numel() for p in MODELS.build("lenet5", channels=1, size=32).parameters()) == 61_706


def test_lenet5_forward_is_the_formula() -> None:
    model, inputs = MODELS.build("lenet5", channels=1, size=20).double(), rand(3, 1, 20, 20)
    s = model.state_dict()
    maps = functional.max_pool2d(functional.conv2d(inputs, s["conv1.weight"], s["conv1.bias"]).clamp(min=0), 2)
    maps = functional.max_pool2d(functional.conv2d(maps, s["conv2.weight"], s["conv2.bias"]).clamp(min=0), 2)
    values = (maps.reshape(3, -1) @ s["fc1.weight"].T + s["fc1.bias"]).clamp(min=0)
    values = (values @ s["fc2.weight"].T + s["fc2.bias"]).clamp(min=0)
    assert torch.allclose(model(inputs), values @ s["fc3.weight"].T + s["fc3.bias"], rtol=1e-10)


def test_lenet_dlg_is_the_released_codes() -> None:
    model = MODELS.build("lenet_dlg", classes=100)
    assert [(name, tuple(p.shape)) for name, p in model.named_parameters()] == [
        ("body.0.weight", (12, 3, 5, 5)),
        ("body.0.bias", (12,)),
        ("body.2.weight", (12, 12, 5, 5)),
        ("body.2.bias", (12,)),
        ("body.4.weight", (12, 12, 5, 5)),
        ("body.4.bias", (12,)),
        ("fc.0.weight", (100, 768)),
        ("fc.0.bias", (100,)),
    ]
    assert [model.body[i].stride for i in (0, 2, 4)] == [(2, 2), (2, 2), (1, 1)]


def test_lenet_dlg_forward_is_the_formula() -> None:
    model, inputs = MODELS.build("lenet_dlg", channels=1, size=9).double(), rand(2, 1, 9, 9)
    s, maps = model.state_dict(), inputs
    for position, stride in ((0, 2), (2, 2), (4, 1)):
        maps = functional.conv2d(maps, s[f"body.{position}.weight"], s[f"body.{position}.bias"], stride=stride, padding=2).sigmoid()
    assert maps.shape == (2, 12, 3, 3)
    assert torch.allclose(model(inputs), maps.reshape(2, -1) @ s["fc.0.weight"].T + s["fc.0.bias"], rtol=1e-10)


@pytest.mark.parametrize("name", ["lenet5", "lenet_dlg"])
def test_head_bias_can_be_left_out(name: str) -> None:
    without = {key for key, _ in MODELS.build(name, head_bias=False).named_parameters()}
    every = {key for key, _ in MODELS.build(name).named_parameters()}
    assert every - without == {"fc3.bias" if name == "lenet5" else "fc.0.bias"}


def test_a_size_that_is_no_number_of_pixels_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.size: expected a positive int"):
        MODELS.build("lenet_dlg", size=0)
