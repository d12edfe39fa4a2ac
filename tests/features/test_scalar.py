"""One sample by one scalar: its feature and its soft label."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.scalar.problem import on_host, scalar_problem
from dosimeter.network.head import find_head
from dosimeter.types import Refused

from .conftest import case_of, errors


def single(label: torch.Tensor, *, bias: bool = False, seed: int = 0, classes: int = 20):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, classes, bias=bias)).eval()
    return case_of(model, torch.rand(1, 64, generator=torch.Generator().manual_seed(seed)), label)


@pytest.mark.parametrize("seed", range(3))
def test_a_one_hot_label_without_bias(seed):
    case = single(torch.tensor([7]), seed=seed)
    found = dm.recover_features(case.exposure, "scalar")
    assert float(errors(found, case).max()) < 1e-3
    assert found.labels.tolist() == [7]
    assert float((found.soft - nn.functional.one_hot(case.labels, 20)).abs().sum()) < 1e-3


@pytest.mark.parametrize("smoothing", [0.1, 0.4])
def test_a_smoothed_label_of_unknown_strength(smoothing):
    label = torch.full((1, 20), smoothing / 20)
    label[0, 4] += 1 - smoothing
    case = single(label, bias=True)
    found = dm.recover_features(case.exposure, "scalar")
    assert float((found.features - case.features).norm() / case.features.norm()) < 1e-3
    assert float((found.soft - label).abs().sum()) < 1e-3


def test_a_mixed_label():
    label = torch.zeros(1, 20)
    label[0, 2], label[0, 9] = 0.3, 0.7
    case = single(label)
    found = dm.recover_features(case.exposure, "scalar", family="mixup")
    assert float((found.soft - label).abs().sum()) < 1e-3


def test_the_label_always_sums_to_one():
    """Theorem 1 of the paper, for any scalar."""
    head = find_head(single(torch.tensor([3])).exposure)
    problem = scalar_problem(head, on_host(head.weight_gradient), 1.0, "smoothing", row=3)
    assert problem.labels(np.array([0.3, -2.0, 17.0])).sum(1) == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_certified_feature_is_within_its_error_bar(bias):
    for seed in range(5):
        case = single(torch.tensor([seed]), bias=bias, seed=seed)
        found = dm.recover_features(case.exposure, "scalar", family="one_hot")
        assert found.certified.all()
        assert float((found.features - case.features).norm() / case.features.norm()) <= float(found.error_bar.max())


def test_two_samples_are_refused(make):
    with pytest.raises(Refused, match="batch of one"):
        dm.recover_features(make([1, 2, 3]).exposure, "scalar")


@pytest.mark.parametrize("rate", [1e-1, 1e-3])
def test_local_steps_that_nobody_declares_are_noticed(rate):
    case = single(torch.tensor([7]), bias=True)
    steps = dm.observe(
        case.exposure.model,
        dm.Batch(torch.rand(1, 64, generator=torch.Generator().manual_seed(0)), torch.tensor([7])),
        training=dm.FedAvg(steps=3, learning_rate=rate),
    )
    found = dm.recover_features(replace(steps, public=replace(steps.public, training=dm.FedSGD())), "scalar")
    assert found.certified.tolist() == [False]
    assert found.premises == ()
    assert any("one gradient" in premise for premise in dm.recover_features(case.exposure, "scalar").premises)
