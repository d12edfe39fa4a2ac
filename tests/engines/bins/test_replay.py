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
        exposed(inputs, labels, training=dm.FedAvg(steps=2, learning_rate=0.1)),
    ):
        assert replayer_for(exposure, exposure.model) is None


@pytest.mark.parametrize("options", [{"declare_batch_size": False}, {"defenses": (dm.defense("clipping", max_norm=1e-3),)}])
def test_an_unknown_share_is_found_in_samples_that_lie_alone(inputs, options):
    """Reference: the share that the client's own gradient shows, 1/3 times clipping's factor."""
    labels = torch.tensor([0, 3, 5])
    known, unknown = exposed(inputs, labels), exposed(inputs, labels, **options)
    replay = replayer_for(unknown, unknown.model)
    assert replay is not None
    assert replay.shares == []
    factor = float(unknown.update["rows.bias"].norm() / known.update["rows.bias"].norm())
    weights = replayer_for(known, known.model)._weights_of_one(inputs.flatten(1).double())[torch.arange(3), labels] * factor / 3
    replay.calibrate(inputs.flatten(1).double(), weights, torch.full((3,), 1e-5).double())
    assert replay.shares == pytest.approx([factor / 3], rel=1e-4)
    assert float(replay(inputs.flatten(1).double(), weights).max()) < 1e-4
    assert unknown.public.batch_size is None or factor < 0.9


def test_a_share_of_no_whole_size_and_a_vote_of_one_sample_prove_no_size(inputs):
    exposure = exposed(inputs, torch.tensor([0, 3, 5]), declare_batch_size=False)
    for scale, count in ((0.31, 3), (1 / 3, 1)):
        replay = replayer_for(exposure, exposure.model)
        weights = replay._weights_of_one(inputs.flatten(1).double())[torch.arange(3), torch.tensor([0, 3, 5])] * scale
        replay.calibrate(inputs.flatten(1).double()[:count], weights[:count], torch.full((count,), 1e-6).double())
        assert replay.shares == []
