"""A tail gives what the whole model gives, from the maps alone."""

import pytest
import torch
from torch import nn

from dosimeter.network.probing import input_of
from dosimeter.network.tail import find_tail
from dosimeter.registry import MODELS


@pytest.mark.parametrize("mode", ["eval", "train"])
@pytest.mark.parametrize("layer", ["layer2.0.conv1", "layer3.0.conv1"])
def test_the_tail_of_true_maps_gives_the_true_features(mode, layer):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = MODELS.build("resnet8", classes=10, size=16).double().train(mode == "train")
    rng = torch.Generator().manual_seed(1)
    inputs, others = (torch.rand(3, 3, 16, 16, generator=rng, dtype=torch.float64) for _ in range(2))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    tail = find_tail(model, layer, "linear", others)
    assert tail is not None
    for _ in range(2):  # a pass leaves no trace
        found = tail(input_of(model, layer, inputs))
        assert torch.allclose(found, input_of(model, "linear", inputs), rtol=1e-10)
    assert find_tail(model, "layer3.0.conv2", "linear", others) is None  # the shortcut leads past it
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())


def test_an_activation_in_place_and_a_first_layer():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(inplace=True), nn.Conv2d(4, 4, 3), nn.Flatten(), nn.Linear(64, 2)).double()
    inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64)
    tail = find_tail(model, "2", "4", torch.zeros_like(inputs))
    assert tail is not None
    assert torch.allclose(tail(input_of(model, "2", inputs)), input_of(model, "4", inputs))
    whole = find_tail(model, "0", "4", torch.zeros_like(inputs))
    assert whole is not None
    assert torch.allclose(whole(inputs), input_of(model, "4", inputs))


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_a_layer_that_pads_by_an_operation_of_its_own_receives_what_is_not_padded_yet(mode):
    padding = nn.Conv2d(4, 4, 3, padding=1, padding_mode=mode)
    explicit = (nn.ReplicationPad2d(1), nn.Conv2d(4, 4, 3))
    for read, place in (([padding], "2"), (explicit, "3")):
        model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), *read, nn.ReLU(), nn.Flatten(), nn.Linear(144, 2)).double()
        inputs = torch.rand(2, 1, 8, 8, dtype=torch.float64)
        head = str(len(model) - 1)
        tail = find_tail(model, place, head, torch.zeros_like(inputs))
        assert tail is not None
        assert torch.allclose(tail(input_of(model, place, inputs)), input_of(model, head, inputs))
