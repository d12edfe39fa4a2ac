"""What every label recovery says of a gradient of zero."""

import itertools
from dataclasses import replace

import pytest
import torch

from dosimeter.runs.server import recover_labels
from dosimeter.types import Outcome

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
