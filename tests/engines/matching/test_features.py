"""Feature matching: what a feature recovery needs is checked before it is asked, and a lack of it is said."""

import pytest
import torch
from torch import nn

import dosimeter as dm


@pytest.mark.parametrize(
    ("features", "bias", "given", "said"),
    [
        ("rgla", True, False, "rgla needs labels"),
        ("quotient", False, True, "quotient needs the"),
        ("subspace", True, True, "certified features"),
    ],
)
def test_a_recovery_whose_needs_are_not_met_is_left_out_and_said(features: str, bias: bool, given: bool, said: str) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 10, bias=bias)).eval()
        batch = dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([1, 4]))
    labels = batch.targets if given else None
    found = dm.reconstruct(dm.observe(model, batch), "dlg", labels=labels, features=features, steps=5, restarts=1)
    assert found.outcome is dm.Outcome.COMPLETED
    assert said in found.message


def test_a_head_that_is_withheld_leaves_no_features_to_match(classifier, batch) -> None:
    exposure = dm.observe(classifier, batch, defenses=("head_withheld",))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, features="subspace", steps=3)
    assert found.message == "no features to match: subspace needs the head gradient: the client withholds the last layer"
