from __future__ import annotations

import math
import typing

import pytest
import torch
from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.registry import MODELS, options_of

WITH_OPTION = [name for name in MODELS if any(option.name == "activation" for option in options_of(MODELS.entry(name)))]

AT_MINUS_ONE_AND_EIGHT = {
    "relu": (0.0, 8.0),
    "relu6": (0.0, 6.0),
    "leaky_relu": (-0.01, 8.0),
    "elu": (math.exp(-1) - 1, 8.0),
    "selu": (1.0507009873554805 * 1.6732632423543772 * (math.exp(-1) - 1), 8 * 1.0507009873554805),
    "swish": (-1 / (1 + math.e), 8 / (1 + math.exp(-8))),
    "tanh": (math.tanh(-1), math.tanh(8)),
    "sigmoid": (1 / (1 + math.e), 1 / (1 + math.exp(-8))),
}


@pytest.mark.parametrize("name", typing.get_args(Activation))
def test_values_are_the_formulas(name: Activation) -> None:
    inputs = torch.tensor([-1.0, 8.0], dtype=torch.float64)
    outputs = activation_layer(name)(inputs)
    assert outputs.tolist() == pytest.approx(AT_MINUS_ONE_AND_EIGHT[name], rel=1e-12)
    assert inputs.tolist() == [-1.0, 8.0]  # not in place


@pytest.mark.parametrize("name", WITH_OPTION)
def test_the_option_reaches_every_non_linearity_and_none_is_in_place(name: str) -> None:
    with torch.device("meta"):
        model = MODELS.build(name, activation="selu")
    kinds = {type(layer) for layer in model.modules() if type(layer).__module__ == "torch.nn.modules.activation"}
    assert kinds == {nn.SELU}
    assert not any(getattr(layer, "inplace", False) for layer in model.modules())
