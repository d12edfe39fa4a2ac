"""The misfit of candidates: nothing at the batch, and the distance of the updates elsewhere."""

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.misfit import misfit


@pytest.mark.parametrize("training", [dm.FedSGD(), dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=2)])
def test_the_batch_explains_its_update(classifier, batch, training):
    own = dm.Batch(batch.inputs[:4], batch.targets[:4])
    exposure = dm.observe(classifier, own, training=training)
    assert misfit(exposure, own.inputs, own.targets) < 1e-5
    assert misfit(exposure, own.inputs, own.targets.roll(1)) > 0.1


def test_it_is_the_relative_distance_of_the_updates(classifier, batch):
    own, other = (dm.Batch(batch.inputs[part], batch.targets[part]) for part in (slice(0, 3), slice(3, 6)))
    sent, given = (dm.observe(classifier, one).update for one in (own, other))
    flat = [torch.cat([update[name].flatten() for name in sent]) for update in (given, sent)]
    expected = float((flat[0] - flat[1]).norm() / flat[1].norm())
    assert misfit(dm.observe(classifier, own), other.inputs, other.targets) == pytest.approx(expected, rel=1e-5)


def test_clipping_scales_the_update_and_hides_nothing(classifier, batch):
    own = dm.Batch(batch.inputs[:4], batch.targets[:4])
    exposure = dm.observe(classifier, own, defenses=(dm.defense("clipping", max_norm=0.01),))
    assert misfit(exposure, own.inputs, own.targets) < 1e-5
