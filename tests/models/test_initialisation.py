from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import OptionError
from dosimeter.registry import MODELS


def drawn(scheme: Initialisation, positive_layers: int = 0) -> dict[str, Tensor]:
    torch.manual_seed(11)
    network = nn.Sequential(nn.Conv2d(32, 128, 3), nn.BatchNorm2d(128), nn.Linear(300, 400), nn.Linear(400, 500))
    return {name: p.detach() for name, p in initialise(network, scheme, positive_layers).named_parameters()}


def assert_normal(weight: Tensor, std: float) -> None:
    standard_error = 1 / math.sqrt(2 * weight.numel())
    assert float(weight.std()) == pytest.approx(std, rel=4 * standard_error)
    assert abs(float(weight.mean())) < 4 * std / math.sqrt(weight.numel())
    assert float(weight.abs().max()) > 3 * std  # a uniform of this std ends at 1.73 of it


def assert_uniform(weight: Tensor, low: float, high: float) -> None:
    assert low <= float(weight.min())
    assert float(weight.max()) <= high
    assert float(weight.std()) == pytest.approx((high - low) / math.sqrt(12), rel=0.02)
    assert float(weight.mean()) == pytest.approx((low + high) / 2, abs=0.02 * (high - low))


def test_kaiming_draws_convolutions_by_fan_out_and_leaves_linear_layers() -> None:
    weights = drawn("kaiming")
    assert_normal(weights["0.weight"], math.sqrt(2 / (128 * 9)))
    assert_uniform(weights["2.weight"], -1 / math.sqrt(300), 1 / math.sqrt(300))
    assert float(weights["0.bias"].abs().max()) > 0


def test_kaiming_gaussian_draws_linear_layers_small_and_biases_zero() -> None:
    weights = drawn("kaiming_gaussian")
    assert_normal(weights["0.weight"], math.sqrt(2 / (128 * 9)))
    assert_normal(weights["3.weight"], 0.01)
    assert all(not weights[name].any() for name in ("0.bias", "2.bias", "3.bias"))


def test_kaiming_fan_in_draws_both_kinds() -> None:
    weights = drawn("kaiming_fan_in")
    assert_normal(weights["0.weight"], math.sqrt(2 / (32 * 9)))
    assert_normal(weights["2.weight"], math.sqrt(2 / 300))


def test_xavier_has_the_gain_of_a_sigmoid() -> None:
    assert_normal(drawn("xavier")["0.weight"], 4 * math.sqrt(2 / (32 * 9 + 128 * 9)))


def test_pytorch_leaves_every_layer_as_it_was() -> None:
    torch.manual_seed(11)
    untouched = nn.Sequential(nn.Conv2d(32, 128, 3), nn.BatchNorm2d(128), nn.Linear(300, 400), nn.Linear(400, 500))
    for name, weight in drawn("pytorch").items():
        assert torch.equal(weight, untouched.get_parameter(name))


def test_uniform_draws_everything() -> None:
    for weight in drawn("uniform").values():
        assert float(weight.abs().max()) <= 0.5
    assert_uniform(drawn("uniform")["2.weight"], -0.5, 0.5)
    assert float(drawn("uniform")["1.weight"].std()) == pytest.approx(1 / math.sqrt(12), rel=0.2)


def test_positive_layers_are_the_last_ones() -> None:
    weights = drawn("pytorch", positive_layers=1)
    assert_uniform(weights["3.weight"], 0.01, 0.2)
    assert not weights["3.bias"].any()
    assert torch.equal(weights["2.weight"], drawn("pytorch")["2.weight"])
    assert_uniform(drawn("pytorch", positive_layers=2)["2.weight"], 0.01, 0.2)


def test_more_positive_layers_than_there_are_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.positive_layers: expected at most"):
        MODELS.build("fcn3", positive_layers=4)


@pytest.mark.parametrize(
    ("name", "options", "scheme"),
    [
        ("alexnet", {"hidden": 64}, "pytorch"),
        ("convnet", {"width": 8}, "pytorch"),
        ("fcn3", {}, "pytorch"),
        ("lenet5", {}, "kaiming"),
        ("lenet_dlg", {}, "uniform"),
        ("mobilenet_v2", {}, "kaiming_gaussian"),
        ("resnet18", {}, "kaiming"),
        ("resnet20", {}, "kaiming_fan_in"),
        ("small_cnn", {"activation": "relu"}, "kaiming"),
        ("small_cnn", {}, "xavier"),
        ("vgg11", {"hidden": 64}, "kaiming_gaussian"),
    ],
)
def test_each_architecture_is_drawn_as_its_paper_draws_it(name: str, options: dict[str, Any], scheme: str) -> None:
    torch.manual_seed(2)
    default = MODELS.build(name, **options).state_dict()
    torch.manual_seed(2)
    named = MODELS.build(name, **options, initialisation=scheme).state_dict()
    assert all(torch.equal(default[key], named[key]) for key in default)
    torch.manual_seed(2)
    other = MODELS.build(name, **options, initialisation="uniform" if scheme == "pytorch" else "pytorch").state_dict()
    assert any(not torch.equal(default[key], other[key]) for key in default)
