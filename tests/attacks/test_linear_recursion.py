"""Linear recursion: exact inputs of fully-connected networks without bias, soft labels unknown; first-layer quotients of batches."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def network(activation: nn.Module, bias: bool, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 48, bias=bias),
            activation,
            nn.Linear(48, 32, bias=bias),
            activation,
            nn.Linear(32, 10, bias=bias),
        )


def decibels(found: dm.Reconstruction, batch: dm.Batch) -> float:
    return float(-10 * (found.inputs - batch.inputs).double().square().mean().log10())


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Tanh(), nn.Sigmoid(), nn.ELU()])
@pytest.mark.parametrize("kind", ["one_hot", "smoothed", "mixed"])
def test_without_bias_and_without_labels(activation, kind, digits) -> None:
    images, labels = digits
    for index in (30, 91):
        one, other = (nn.functional.one_hot(labels[i : i + 1], 10).float() for i in (index, index + 1))
        target = {"one_hot": one, "smoothed": 0.7 * one + 0.03, "mixed": 0.35 * one + 0.65 * other}[kind]
        batch = dm.Batch(images[index : index + 1], target)
        found = dm.reconstruct(dm.observe(network(activation, bias=False), batch), "linear_recursion")
        assert decibels(found, batch) > 60
        assert float((found.labels - target).abs().sum()) < 1e-3


def test_a_given_label_settles_the_scale(digits) -> None:
    images, labels = digits
    batch = dm.Batch(images[5:6], labels[5:6])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=False), batch), "linear_recursion", labels=batch.targets)
    assert decibels(found, batch) > 60


def test_with_bias_the_first_layer_is_divided(digits) -> None:
    images, labels = digits
    one = dm.Batch(images[7:8], labels[7:8])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=True), one), "linear_recursion")
    assert decibels(found, one) > 80
    several = dm.Batch(images[10:13], labels[10:13])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=True), several), "linear_recursion")
    assert len(found.inputs) >= 1
    assert float(torch.cdist(found.inputs.flatten(1), several.inputs.flatten(1)).min(1).values.max()) < 1e-2


def test_refusals(digits, classifier) -> None:
    images, labels = digits
    with pytest.raises(dm.Refused, match="batch of one"):
        dm.reconstruct(dm.observe(network(nn.ReLU(), bias=False), dm.Batch(images[:2], labels[:2])), "linear_recursion")
    with pytest.raises(dm.Refused, match="plain chain"):
        dm.reconstruct(dm.observe(classifier, dm.Batch(images[:1], labels[:1])), "linear_recursion")
    with pytest.raises(dm.Refused, match="knows ReLU"):
        dm.reconstruct(dm.observe(network(nn.GELU(), bias=False), dm.Batch(images[:1], labels[:1])), "linear_recursion")
