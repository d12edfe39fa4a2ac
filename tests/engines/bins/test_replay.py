"""The replay: a sample's weight at an inserted layer is the one that the client's own gradient shows."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.bins.replay import (
    CHANCE_TOLERANCE,
    replayer_for,
)

SHAPE, CLASSES = (1, 6, 6), 7


def model(*extra: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), *extra, nn.Flatten(), nn.Linear(64, CLASSES)).eval()


def exposed(inputs, labels, body=None, **options):
    attack = dm.attack("imprint", bins=24, input_shape=SHAPE)
    return dm.observe(attack.tamper(body or model()), dm.Batch(inputs, labels), **options)


@pytest.fixture
def inputs(rng):
    return torch.randint(256, (3, *SHAPE), generator=rng) / 255


def test_the_weight_of_one_sample_is_its_rows_bias_gradient(inputs):
    """Reference: autograd on the client. All rows that a lone sample fires have its weight as their bias gradient."""
    for label in range(CLASSES):
        exposure = exposed(inputs[:1], torch.tensor([label]))
        layer = exposure.model
        fired = layer.rows(inputs[:1].flatten(1))[0] > 0
        seen = exposure.update["rows.bias"][fired].double()
        assert float(seen.std() / seen.mean().abs()) < 1e-5
        replay = replayer_for(exposure, layer)
        assert replay is not None
        off = replay.mismatch(inputs[:1].flatten(1).double(), seen[:1])[0]
        assert float(off[label]) < 1e-4
        assert replay.find_labels(inputs[:1].flatten(1).double(), seen[:1]).tolist() == [label]


def test_a_mixture_has_another_weight(inputs):
    exposure = exposed(inputs, torch.tensor([0, 3, 5]))
    replay = replayer_for(exposure, exposure.model)
    assert replay is not None
    mixture, weight = inputs.mean(0).flatten()[None].double(), exposure.update["rows.bias"][:1].double()
    assert float(replay(mixture, weight)) > replay.exact
    assert replay.exact == CHANCE_TOLERANCE / CLASSES
    assert replay.find_labels(mixture, weight * 50).tolist() == [-1]


def test_only_labels_that_occur_are_tried(inputs):
    exposure = exposed(inputs, torch.tensor([0, 3, 5]))
    replay = replayer_for(exposure, exposure.model, torch.tensor([3, 5]))
    assert replay is not None
    assert replay.mismatch(inputs.flatten(1).double(), torch.ones(3).double()).shape == (3, 2)


def test_what_depends_on_other_samples_is_not_replayed(inputs):
    labels = torch.tensor([0, 3, 5])
    normed = model(nn.BatchNorm2d(4))
    fixed = exposed(inputs, labels, normed)
    assert replayer_for(fixed, fixed.model) is not None
    for exposure in (
        exposed(inputs, labels, normed.train()),
        exposed(inputs, labels, declare_batch_size=False),
        exposed(inputs, labels, training=dm.FedAvg(steps=2, learning_rate=0.1)),
    ):
        assert replayer_for(exposure, exposure.model) is None
