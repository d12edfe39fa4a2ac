"""The narrowest place before the head, of models whose sizes are known."""

import pytest
import torch
from torch import nn

from dosimeter.models.loading import load_model
from dosimeter.network.bottleneck import narrowest
from dosimeter.network.input_shape import find_head_name


def test_the_input_itself_is_the_narrowest_where_layers_widen_it() -> None:
    model = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 3))
    assert narrowest(model, "0", (6,)) == 6
    assert narrowest(model, "2", (6,)) == 9


def test_pooling_that_no_module_does_counts_as_a_narrow_layer() -> None:
    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.head(self.convolution(inputs).mean((2, 3)))

    assert narrowest(Pooled(), "head", (1, 8, 8)) == 8


@pytest.mark.parametrize(("name", "options", "fewest"), [("convnet", {"width": 2}, 800), ("vgg11", {"hidden": 4096}, 512)])
def test_the_narrowest_layer_is_found(name, options, fewest) -> None:
    model = load_model(name, options, None, 1)
    assert narrowest(model, find_head_name(model, (3, 32, 32)), (3, 32, 32)) == fewest
