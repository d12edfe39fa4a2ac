"""First layers: proved by the form of their gradients, in any mode, and not claimed where the input was changed before."""

import random

import pytest
import torch
from torch import nn

from dosimeter.network.first_layer import find_first_layers


class Twice(nn.Module):
    """One weight on the input and on the input mirrored."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(48, 20), nn.Linear(20, 4)

    def forward(self, inputs):
        return self.head((self.first(inputs.flatten(1)) + self.first(inputs.flatten(1).flip(1))).relu())


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(48, 20), nn.Linear(48, 12), nn.Linear(32, 4)

    def forward(self, inputs):
        return self.head(torch.cat([self.left(inputs.flatten(1)).relu(), self.right(inputs.flatten(1)).tanh()], 1))


def test_modules_kernels_and_branches_are_found() -> None:
    shape = (3, 4, 4)
    plain = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(), nn.Linear(20, 4))
    before = {name: value.clone() for name, value in plain.state_dict().items()}
    assert find_first_layers(plain, shape) == [("1.weight", "1.bias")]  # in train mode
    assert all(torch.equal(before[name], value) for name, value in plain.state_dict().items())
    assert find_first_layers(plain.eval(), shape) == [("1.weight", "1.bias")]
    kernel = nn.Sequential(nn.Conv2d(3, 20, 4), nn.GELU(), nn.Flatten(), nn.Linear(20, 4))
    assert find_first_layers(kernel, shape) == [("0.weight", "0.bias")]
    assert find_first_layers(Branches(), shape) == [("left.weight", "left.bias"), ("right.weight", "right.bias")]


def test_what_does_not_see_the_raw_input_is_not_found() -> None:
    shape = (3, 4, 4)
    assert find_first_layers(nn.Sequential(nn.Flatten(), nn.Linear(48, 20, bias=False), nn.ReLU(), nn.Linear(20, 4)), shape) == []
    assert find_first_layers(nn.Sequential(nn.Conv2d(3, 3, 3, padding=1), nn.Flatten(), nn.Linear(48, 20), nn.Linear(20, 4)), shape) == []
    assert find_first_layers(nn.Sequential(nn.LayerNorm([3, 4, 4]), nn.Flatten(), nn.Linear(48, 4)), shape) == []
    assert find_first_layers(nn.Sequential(nn.Flatten(), nn.Dropout(), nn.Linear(48, 4)), shape) == []
    assert find_first_layers(Twice(), shape) == []


class Preparing(nn.Module):
    """Changes its inputs in its own forward, in ways that pixels or a mean over samples do not show."""

    def __init__(self, how: str, *, bare: bool = False) -> None:
        super().__init__()
        self.first, self.head, self.how, self.bare = nn.Linear(48, 20), nn.Linear(20, 4), how, bare
        if bare:
            self.weight, self.bias = nn.Parameter(torch.randn(20, 48)), nn.Parameter(torch.zeros(20))

    def forward(self, inputs):
        flat = self.prepare(inputs.flatten(1))
        return self.head((flat @ self.weight.T + self.bias if self.bare else self.first(flat)).relu())

    def prepare(self, flat):
        if self.how == "cut":
            return flat.clamp(-1, 1)
        if self.how == "turned at times":
            return flat.flip(1) if self.training and (random.random() if self.bare else torch.rand(())) < 0.2 else flat
        if self.how == "mixed":
            return 0.7 * flat + 0.3 * flat[torch.randperm(len(flat))] if self.training else flat
        if self.how == "drawn to the mean":
            return 0.9 * flat + 0.1 * flat.mean(0)
        if self.how == "dark ones turned":
            return torch.where(flat.mean(1, keepdim=True) < 0.3, flat.flip(1), flat)
        return flat


@pytest.mark.parametrize("bare", [False, True])
@pytest.mark.parametrize("how", ["cut", "turned at times", "mixed", "drawn to the mean", "dark ones turned"])
def test_a_layer_behind_a_change_that_pixels_do_not_show_is_not_found(how, bare) -> None:
    model = Preparing(how, bare=bare)
    assert find_first_layers(model, (3, 4, 4)) == []
    torch.manual_seed(7)
    before = torch.get_rng_state(), random.getstate()
    find_first_layers(model, (3, 4, 4))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert random.getstate() == before[1]


@pytest.mark.parametrize("bare", [False, True])
def test_a_layer_of_the_same_network_that_takes_its_samples_as_they_are_is_found(bare) -> None:
    names = ("weight", "bias") if bare else ("first.weight", "first.bias")
    assert find_first_layers(Preparing("", bare=bare), (3, 4, 4)) == [names]
    assert find_first_layers(Preparing("turned at times", bare=bare).eval(), (3, 4, 4)) == [names]


class Bounded(nn.Module):
    """Takes no numbers beyond pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 4))

    def forward(self, inputs):
        if inputs.min() < 0 or inputs.max() > 1:
            raise ValueError("pixels, please")
        return self.net(inputs)


def test_a_model_that_refuses_what_is_no_pixel_has_a_first_layer() -> None:
    assert find_first_layers(Bounded(), (3, 4, 4)) == [("net.1.weight", "net.1.bias")]
