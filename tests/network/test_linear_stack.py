"""The linear layers before the head that ReLUs alone divide."""

import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.linear_stack import StackedLayer, find_linear_stack


def stack_of(model: nn.Module, shape: tuple[int, ...], head: str) -> list[StackedLayer]:
    batch = dm.Batch(torch.rand(2, *shape), torch.tensor([0, 1]))
    return find_linear_stack(dm.observe(model, batch), head)


def test_the_stack_goes_on_through_relus_and_stops_at_other_layers():
    layers = [nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 12, bias=False), nn.ReLU(), nn.Linear(12, 10)]
    found = stack_of(nn.Sequential(*layers), (32,), "4")
    assert [layer.name for layer in found] == ["0", "2", "4"]
    assert torch.equal(found[0].weight, layers[0].weight)
    assert torch.equal(found[0].bias, layers[0].bias)
    assert found[1].bias is None
    layers[1] = nn.Tanh()
    assert [layer.name for layer in stack_of(nn.Sequential(*layers), (32,), "4")] == ["2", "4"]


def test_dropout_between_is_not_seen_in_eval_mode():
    model = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10)).train()
    assert [layer.name for layer in stack_of(model, (32,), "3")] == ["0", "3"]
    assert model.training


def test_a_kernel_as_large_as_its_input_is_a_linear_layer_and_a_smaller_one_is_not():
    for kernel, names in ((4, ["0", "3"]), (2, ["3"])):
        features = 8 * (5 - kernel) ** 2
        model = nn.Sequential(nn.Conv2d(3, 8, kernel), nn.ReLU(), nn.Flatten(), nn.Linear(features, 10))
        found = stack_of(model, (3, 4, 4), "3")
        assert [layer.name for layer in found] == names
    whole = stack_of(nn.Sequential(nn.Conv2d(3, 8, 4), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10)), (3, 4, 4), "3")[0]
    assert whole.weight.shape == (8, 48)
