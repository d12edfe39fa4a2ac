"""What every label recovery says of a gradient of zero, and of updates that are no gradients."""

import itertools
from dataclasses import replace

import pytest
import torch

from dosimeter.runs.server import recover_labels
from dosimeter.types import Outcome, Refused

INFERRING = ["idlg", "gradinversion", "zlg", "ilrg", "posterior", "gradient_bridge"]  # do without a declared batch size


@pytest.mark.parametrize(
    ("method", "size"),
    [*itertools.product([*INFERRING, "llg", "llg_plus", "llg_star", "cv_matching"], [4, 12]), *((name, None) for name in INFERRING)],
)
def test_a_gradient_of_zero_is_said_to_tell_nothing(expose, method, size):
    exposure = expose([1, 2, 2, 7], auxiliary_per_class=3)
    nothing = {name: torch.zeros_like(change) for name, change in exposure.update.items()}
    exposure = replace(exposure, update=nothing, public=replace(exposure.public, batch_size=size))
    estimate = recover_labels(exposure, method)
    assert estimate.outcome is Outcome.SINGULAR
    assert "zero, and nothing tells the labels" in estimate.message
    assert int(estimate.counts.sum()) == len(estimate.labels) == (size or 1)


METHODS = [*INFERRING, "llg", "llg_plus", "llg_star", "cv_matching", "rlg", "subspace"]
ODD = {
    "zero": torch.zeros_like,
    "noise": lambda change: torch.randn(change.shape, generator=torch.Generator().manual_seed(0)),
    "constant": torch.ones_like,
    "huge": lambda change: change * (1e37 / change.abs().max()),
    "denormal": lambda change: change * 1e-42,
}


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("size", [1, 4])
def test_an_odd_update_is_a_finding_and_no_proof(expose, method, odd, size):
    """Rank 0, full rank, one row repeated, values next to overflow and to zero: no crash, whole counts, no certificate."""
    exposure = expose([1, 2, 2, 7][:size], auxiliary_per_class=3)
    exposure = replace(exposure, update={name: ODD[odd](change) for name, change in exposure.update.items()})
    try:
        found = recover_labels(exposure, method)
    except Refused:
        return
    assert len(found.labels) == int(found.counts.sum())
    assert int(found.counts.min()) >= 0
    assert not found.certified or torch.equal(found.counts, torch.bincount(torch.tensor([1, 2, 2, 7][:size]), minlength=10))


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_updates_that_are_not_finite_are_refused(expose, value):
    exposure = expose([1, 2])
    exposure = replace(exposure, update={name: torch.full_like(change, value) for name, change in exposure.update.items()})
    with pytest.raises(ValueError, match="NaN or infinite"):
        recover_labels(exposure, "subspace")
