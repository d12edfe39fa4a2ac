"""Counts by the subspace method."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import Focal
from dosimeter.client.observe import observe
from dosimeter.labels.subspace import Subspace
from dosimeter.runs.server import recover_labels
from dosimeter.types import Batch, Outcome, Refused


def test_counts_are_exact_and_certified_without_batch_size_or_bias(expose):
    labels = [3, 3, 7, 9, 20, 20, 20, 31]
    exposure = expose(labels, classes=50, bias=False, declare=False)
    found = recover_labels(exposure, "subspace")
    assert torch.equal(found.counts, torch.bincount(torch.tensor(labels), minlength=50))
    assert torch.equal(found.labels, torch.tensor(labels).sort().values)
    assert found.certified
    assert found.confidence == 1.0
    assert found.outcome is Outcome.COMPLETED


def test_scores_put_present_classes_first(expose):
    found = recover_labels(expose([1, 4, 4, 8], classes=40), "subspace")
    assert set(found.scores.topk(3).indices.tolist()) == {1, 4, 8}


def test_a_batch_beyond_the_rank_is_a_guess_of_the_right_size(expose):
    found = recover_labels(expose([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1], classes=10), "subspace")
    assert not found.certified
    assert int(found.counts.sum()) == 12
    assert found.outcome in (Outcome.AMBIGUOUS, Outcome.PARTIAL)


def test_agrees_with_the_row_of_negative_signs_for_distinct_labels(expose):
    """The reference: without repeated labels, the classes with a negative bias gradient are the batch's."""
    exposure = expose([2, 11, 23, 35], classes=40)
    negative = exposure.update["2.bias"] < 0
    assert torch.equal(recover_labels(exposure, "subspace").counts > 0, negative)


def test_other_losses_are_refused(expose):
    with pytest.raises(Refused, match="cross-entropy"):
        recover_labels(expose([1, 2], loss=Focal()), Subspace())


def test_mixed_labels_come_back_as_soft_ones(expose):
    rng = torch.Generator().manual_seed(5)
    hard = torch.nn.functional.one_hot(torch.tensor([3, 17, 25, 8]), 60).float()
    share = 0.5 + 0.4 * torch.rand(4, 1, generator=rng)
    soft = share * hard + (1 - share) * hard.roll(1, 0)
    found = recover_labels(expose(soft, classes=60), "subspace")
    assert found.certified
    order = soft.argmax(1).argsort()
    assert torch.equal(found.labels, soft.argmax(1)[order])
    assert float((found.soft - soft[order]).abs().max()) < 1e-4


def black_image(seed=900, **options):
    """Six images of which the first is black, in a network whose hidden layer has no bias."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64, bias=False), nn.ReLU(), nn.Linear(64, 50, bias=options.pop("head_bias", True)))
    images, labels = torch.rand(6, 3, 8, 8), torch.randperm(50)[:6]
    images[0] = 0
    return observe(model, Batch(images, labels), **options), labels


@pytest.mark.parametrize("declare", [True, False])
def test_a_black_image_is_proved_by_the_signs_of_the_bias(declare):
    exposure, labels = black_image(declare_batch_size=declare)
    found = recover_labels(exposure, "subspace")
    assert torch.equal(found.counts, torch.bincount(labels, minlength=50))
    assert found.certified


@pytest.mark.parametrize("declare", [True, False])
def test_a_sample_without_any_trace_leaves_the_certificate_partial(declare):
    exposure, labels = black_image(head_bias=False, declare_batch_size=declare)
    found = recover_labels(exposure, "subspace")
    assert not found.certified
    assert found.outcome is Outcome.PARTIAL
    assert "1 of 6 samples leave no trace" in found.message
    assert torch.equal(found.details["proved"], torch.bincount(labels[1:], minlength=50))
    assert found.confidence == pytest.approx(5 / 6)


def test_a_sample_that_the_model_is_sure_of_leaves_no_trace():
    """The law: a sample of probability 1 changes nothing but the share of the others, which names how many are missing."""
    exposure, labels = black_image()
    head = exposure.model[3]
    with torch.no_grad():
        head.bias[labels[0]] += 200.0  # the black image's own class; the other images are then sure of a wrong one
    images = torch.rand(6, 3, 8, 8)
    images[0] = 0
    found = recover_labels(observe(exposure.model, Batch(images, labels)), "subspace")
    assert not found.certified
    assert not bool((found.details["proved"] > torch.bincount(labels, minlength=50)).any())


def test_with_scale_and_size_unknown_nothing_is_certified():
    exposure, _ = black_image(declare_batch_size=False, defenses=[dm.defense("clipping", max_norm=0.05)])
    found = recover_labels(exposure, "subspace")
    assert not found.certified
    assert "samples that leave no trace may be missing" in found.message


def test_the_premises_name_the_declared_size(expose):
    found = recover_labels(expose([1, 4, 4, 8], classes=40), "subspace")
    assert "the batch size is 4, as declared" in found.premises
