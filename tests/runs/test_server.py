"""The server's calls: labels in any form, checks before the method, and a random stream of its own."""

from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.runs.server import as_label_estimate


@pytest.fixture
def exposure(classifier, batch) -> dm.Exposure:
    return dm.observe(classifier, batch)


def test_labels_in_every_form_become_an_estimate(exposure):
    public = exposure.public
    ids = as_label_estimate(torch.tensor([3, -1, 3, 0]), public)
    assert ids.counts.tolist() == [1, 0, 0, 2, 0, 0, 0, 0, 0, 0]
    assert ids.labels.tolist() == [3, -1, 3, 0]
    assert ids.soft is None
    rows = torch.eye(10)[[2, 5]] * 0.8 + 0.02
    soft = as_label_estimate(rows, public)
    assert soft.labels.tolist() == [2, 5]
    assert soft.soft is rows
    assert as_label_estimate(ids, public) is ids
    assert as_label_estimate(None, public) is None


@pytest.mark.parametrize(
    ("labels", "phrase"),
    [
        (torch.tensor([1.0, 2.0]), "class ids"),
        (torch.rand(2, 7), r"\(B, 10\) soft labels"),
        (torch.zeros(2, 10), "must sum to 1"),
        (torch.tensor([10]), "at least one class id in 0..9"),
        (torch.tensor([-2]), "or -1 for an unknown one"),
        (torch.tensor([], dtype=torch.int64), "at least one class id"),
    ],
)
def test_labels_that_the_model_cannot_have_are_refused(exposure, labels, phrase):
    with pytest.raises(ValueError, match=phrase):
        as_label_estimate(labels, exposure.public)
    with pytest.raises(TypeError, match="got list"):
        as_label_estimate([1, 2], exposure.public)


def test_a_method_by_name_and_options_is_the_object(exposure, batch):
    named = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=3, seed=2)
    before = torch.random.get_rng_state()
    built = dm.reconstruct(exposure, dm.attack("inverting_gradients", steps=3), labels=batch.targets, seed=2)
    assert torch.equal(named.inputs, built.inputs)
    assert torch.equal(torch.random.get_rng_state(), before)
    other = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=3, seed=3)
    assert not torch.equal(named.inputs, other.inputs)


def test_the_true_labels_and_features_come_back(exposure, classifier, batch):
    labels = dm.recover_labels(exposure, "ilrg")
    assert torch.equal(labels.counts, torch.bincount(batch.targets, minlength=10))
    one = dm.observe(classifier, dm.Batch(batch.inputs[:1], batch.targets[:1]))
    features = dm.recover_features(one, "quotient").features
    torch.testing.assert_close(features, classifier[:5](batch.inputs[:1]).to(features), rtol=1e-4, atol=1e-6)


def test_the_update_and_the_needs_are_checked_first(exposure):
    broken = replace(exposure, update={"5.weight": torch.full((10, 12), torch.nan)})
    for call, method in ((dm.recover_labels, "ilrg"), (dm.recover_features, "subspace"), (dm.reconstruct, "dlg")):
        with pytest.raises(ValueError, match="has NaN"):
            call(broken, method)
    with pytest.raises(dm.Refused, match="ilrg needs the head"):
        dm.recover_labels(replace(exposure, update={"0.weight": exposure.update["0.weight"]}), "ilrg")


def test_an_estimate_over_other_classes_is_refused(classifier, batch):
    exposure = dm.observe(classifier, batch)
    narrow = dm.LabelEstimate(counts=torch.ones(3, dtype=torch.int64), labels=torch.arange(3))
    with pytest.raises(ValueError, match="labels: expected an estimate over 10 classes"):
        dm.reconstruct(exposure, "dlg", labels=narrow, steps=1)
