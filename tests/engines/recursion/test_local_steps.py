"""One sample through two local steps: its neurons change as it changes them by itself, and those of a mixture do not."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.recursion.local_steps import LocalSteps
from dosimeter.engines.recursion.own_gradients import OwnGradients


def network(classes: int, seed: int, *hidden: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inner = [layer for _ in hidden for layer in (nn.Linear(100, 100), nn.ReLU())]
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 100), nn.ReLU(), *inner, nn.Linear(100, classes))


def explained(count: int, classes: int, seed: int, labels=None, declared=None, **training) -> dict[int, bool]:
    """Whether the neurons that each sample fires alone are explained by it; −1: those that two samples of a batch of two share."""
    rng = torch.Generator().manual_seed(seed)
    batch = dm.Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randint(classes, (count,), generator=rng))
    batch = batch if labels is None else dm.Batch(batch.inputs, torch.tensor(labels))
    exposure = dm.observe(network(classes, seed), batch, training=dm.FedAvg(learning_rate=0.2, **training))
    exposure = replace(exposure, public=replace(exposure.public, batch_size=declared or count))
    own = OwnGradients(exposure, ["1.bias"])
    local = LocalSteps(exposure, own, "1.weight", "1.bias")
    fires = exposure.model[1](batch.inputs.flatten(1)) > 0
    weight, bias = exposure.update["1.weight"].double(), exposure.update["1.bias"].double()
    found = {}
    for sample in range(-1, count):
        alone = fires.all(0) if sample < 0 else fires[sample] & (fires.sum(0) == 1)
        rows = (alone & (bias != 0)).nonzero().flatten()[:6]
        if len(rows) >= 3:
            inputs = bias[rows] @ weight[rows] / bias[rows].square().sum()
            found[sample] = local.explain(own.respond(inputs, rows), bias[rows])
    return found


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_a_sample_explains_the_neurons_that_it_fires_alone(classes) -> None:
    """Not all: a neuron that the other sample fires after the first step is shared."""
    answers = [answer for seed in range(8) for sample, answer in explained(2, classes, seed, steps=2).items() if sample >= 0]
    assert len(answers) >= 12
    assert sum(answers) >= 5


@pytest.mark.parametrize("classes", [2, 3])
def test_a_mixture_of_two_samples_does_not_explain_theirs(classes) -> None:
    answers = [explained(2, classes, seed, labels=[1, 1], steps=2).get(-1) for seed in range(6)]
    assert answers.count(False) >= 4
    assert not any(answers)


def test_a_wrong_batch_size_is_another_weight() -> None:
    assert not any(answer for seed in range(3) for answer in explained(2, 2, seed, steps=2, declared=3).values())


def test_momentum_mini_batches_and_more_steps_are_not_followed() -> None:
    for options in ({"steps": 2, "momentum": 0.9}, {"steps": 2, "mini_batch": 1}, {"steps": 3}, {"steps": 1}):
        assert not any(explained(2, 2, 0, **options).values())


def test_a_layer_that_does_not_follow_explains_nothing() -> None:
    """Of two hidden layers, the weights of the last one are not those that the first layer's neurons pass their values on with."""
    batch = dm.Batch(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(1)), torch.tensor([1]))
    exposure = dm.observe(network(3, 1, 100), batch, training=dm.FedAvg(learning_rate=0.05, steps=2))
    own = OwnGradients(exposure, ["1.bias"])
    local = LocalSteps(exposure, own, "1.weight", "1.bias")
    bias = exposure.update["1.bias"].double()
    rows = bias.abs().argsort(descending=True)[:6]
    response = own.respond(batch.inputs[0].flatten().double(), rows)
    assert local.following == "3"
    assert local.explain(response, bias[rows])
    local.following = "5"
    assert not local.explain(response, bias[rows])
