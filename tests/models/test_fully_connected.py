from __future__ import annotations

import pytest
import torch
from torch import nn

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


@pytest.mark.parametrize(
    ("name", "options", "shapes"),
    [
        ("fcn3", {"channels": 1, "size": 28}, [(300, 784), (300, 300), (10, 300)]),
        ("fcn4", {"size": 64, "classes": 17}, [(4096, 12288), (1024, 4096), (256, 1024), (17, 256)]),
        ("mlp6", {}, [(2048, 3072), (1024, 2048), (512, 1024), (256, 512), (128, 256), (64, 128), (10, 64)]),
        ("fcn3", {"hidden": (), "channels": 1, "size": 4}, [(10, 16)]),
    ],
)
def test_shapes_are_the_papers(name: str, options: dict[str, object], shapes: list[tuple[int, int]]) -> None:
    with torch.device("meta"):
        model = MODELS.build(name, **options)
    assert [tuple(layer.weight.shape) for layer in model.modules() if isinstance(layer, nn.Linear)] == shapes


def test_fcn3_on_mnist_has_the_parameters_of_784_300_300_10() -> None:
    assert sum(p.numel() for p in MODELS.build("fcn3", channels=1, size=28).parameters()) == 784 * 300 + 300 + 300 * 300 + 300 + 3010


@pytest.mark.parametrize(("name", "bias"), [("fcn3", True), ("fcn4", False), ("mlp6", True)])
def test_bias_is_the_papers_and_can_be_turned(name: str, bias: bool) -> None:
    with torch.device("meta"):
        default, turned = MODELS.build(name), MODELS.build(name, bias=not bias)
    assert any(key.endswith("bias") for key, _ in default.named_parameters()) is bias
    assert any(key.endswith("bias") for key, _ in turned.named_parameters()) is not bias


def test_forward_is_the_formula() -> None:
    model = MODELS.build("fcn3", channels=2, size=3, classes=4, hidden=(6, 5), activation="tanh").double()
    inputs = torch.randn(7, 2, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    state = model.state_dict()
    values = inputs.reshape(7, 18)
    for layer in ("fc1", "fc2"):
        values = torch.tanh(values @ state[f"{layer}.weight"].T + state[f"{layer}.bias"])
    assert torch.allclose(model(inputs), values @ state["fc3.weight"].T + state["fc3.bias"], rtol=1e-12)


def test_a_width_of_zero_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.hidden\[1\]: expected a positive int"):
        MODELS.build("fcn3", hidden=[300, 0])
