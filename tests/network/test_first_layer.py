"""First layers: proved by the form of their gradients, in any mode, and not claimed where the input was changed before."""

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
