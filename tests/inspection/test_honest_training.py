"""What honest training and honest beginnings leave: rows that turned, saturated networks, copies of rows."""

import copy

import pytest
import torch
from torch import nn

from dosimeter.inspection.inspect import inspect


@pytest.mark.parametrize("seed", range(3))
def test_many_steps_with_momentum_follow_from_the_round_before(seed, digits) -> None:
    images, labels = digits
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 10))
    before = copy.deepcopy(model)
    pixels = nn.functional.interpolate(images, (16, 16)).expand(-1, 3, -1, -1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(40):
        chosen = torch.randint(len(images), (32,), generator=rng)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(pixels[chosen]), labels[chosen]).backward()
        optimizer.step()
    cosines = torch.cosine_similarity(model[1].weight, before[1].weight)
    assert float(cosines.detach().median()) < 0.3
    found = inspect(model, reference=before)
    assert not found.suspicious, str(found)
    with torch.no_grad():
        model[1].weight.copy_(model[1].weight.roll(1, 0))
    assert inspect(model, reference=before).suspicious


@pytest.mark.parametrize("activation", [nn.Tanh, nn.Sigmoid, nn.ReLU])
def test_a_network_that_few_classes_saturated_is_honest(activation, data) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), activation(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    for step in range(60):  # one class alone, until it is all that the network says
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(data(16, step).inputs), torch.zeros(12, dtype=torch.int64)).backward()
        optimizer.step()
    found = inspect(model, data(16, 99))
    assert not found.suspicious, str(found)


def test_copies_and_mirror_images_that_fire_at_one_place_are_no_bins(data) -> None:
    wide = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 10))
    linear = copy.deepcopy(wide)
    with torch.no_grad():
        wide[1].weight[32:], wide[1].bias[32:] = wide[1].weight[:32].clone(), wide[1].bias[:32].clone()
        linear[1].weight[32:], linear[1].bias[:] = -linear[1].weight[:32], 0.0
    assert not inspect(wide, data(16, 1)).suspicious
    assert not inspect(linear, data(16, 1)).suspicious
    with torch.no_grad():
        wide[1].bias[32:] -= 0.2  # now each pair has a bin between its two
    assert inspect(wide, data(16, 1)).suspicious


def test_the_two_rows_of_two_classes_may_turn_at_once(data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.Tanh(), nn.Linear(64, 2))
    before = copy.deepcopy(model)
    with torch.no_grad():
        model[3].weight.copy_(-model[3].weight)
    batch = data(16, 7)
    found = inspect(model, type(batch)(batch.inputs, batch.targets % 2), before)
    assert not found.suspicious, str(found)
