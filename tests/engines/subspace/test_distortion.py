"""What the defenses in force leave unsaid of a layer."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.defenses.outgoing import OutgoingDefense, live_entries
from dosimeter.engines.subspace.distortion import distortion_of, missing_noise
from dosimeter.network.head import find_head


def sent(*defenses):
    """The head's gradient as it was and as it was sent, and what is public."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20))
    batch = dm.Batch(torch.rand(6, 30), torch.arange(6))
    plain, spoilt = dm.observe(model, batch), dm.observe(model, batch, defenses=defenses)
    change = find_head(spoilt).weight_gradient
    assert change is not None
    return find_head(plain).weight_gradient, change, spoilt.public


@pytest.mark.parametrize(
    "defense",
    [
        dm.defense("pruning", ratio=0.9),
        dm.defense("pruning", ratio=0.99, scope="update"),
        dm.defense("clipping", max_norm=0.01, mode="value"),
        dm.defense("quantisation", bits=2),
        dm.defense("quantisation", bits=4, stochastic=True),
        dm.defense("soteria", ratio=0.3),
    ],
)
def test_live_entries_are_exact_and_the_others_lie_within_their_bounds(defense):
    truth, change, public = sent(defense)
    found = distortion_of(change, public)
    assert found is not None
    assert found.noise == 0
    assert torch.equal(change[found.live], truth[found.live])
    slack = 1e-6 * float(truth.abs().max())
    assert bool(((truth >= found.low - slack) & (truth <= found.high + slack)).all())
    assert int((~found.live).sum()) > 0


def test_the_noise_of_several_defenses_adds_up():
    _, change, public = sent(
        dm.defense("clipping", max_norm=1.0), dm.defense("gaussian_noise", std=0.03), dm.defense("laplace_noise", scale=0.04 / 2**0.5)
    )
    found = distortion_of(change, public)
    assert found is not None
    assert found.noise == pytest.approx(0.05)
    assert bool(found.live.all())


def test_dpsgd_adds_its_noise_over_the_batch_size():
    _, change, public = sent(dm.defense("dpsgd", max_norm=2.0, noise_multiplier=0.3))
    found = distortion_of(change, public)
    assert found is not None
    assert found.noise == pytest.approx(0.3 * 2 / 6)


def test_survivors_are_told_by_their_size_where_noise_fills_the_zeros():
    _, change, public = sent(dm.defense("pruning", ratio=0.9), dm.defense("gaussian_noise", std=1e-6))
    found = distortion_of(change, public)
    assert found is not None
    assert int(found.live.sum()) == 80


@pytest.mark.parametrize(
    "defenses",
    [(), (dm.defense("pruning", ratio=0.0),), (dm.defense("clipping", max_norm=1.0),), (dm.defense("quantisation", bits=32),)],
)
def test_nothing_is_said_where_no_entry_is_distorted(defenses):
    _, change, public = sent(*defenses)
    assert distortion_of(change, public) is None
    assert distortion_of(None, public) is None


@dataclass(frozen=True, kw_only=True)
class Quiet(OutgoingDefense):
    """Declares noise of `std`, and adds a `share` of it."""

    std: float
    share: float

    def protect(self, update, rng):
        return {name: change + self.share * self.std * torch.randn(change.shape, generator=rng) for name, change in update.items()}

    def distorts(self):
        return True

    def distortion(self, change, public):
        return live_entries(change, noise=self.std)

    def scaling(self):
        return "none"


@pytest.mark.parametrize(
    ("defenses", "missing"),
    [
        ((), False),
        ((Quiet(std=1e-3, share=1.0),), False),
        ((Quiet(std=1e-3, share=0.0),), True),
        ((Quiet(std=1e-3, share=0.2),), True),
        ((Quiet(std=1e-12, share=0.0),), False),  # rounding hides as much
        ((Quiet(std=1e-3, share=1.0), dm.defense("clipping", max_norm=1e-3)), False),  # scaled down after it was added
        ((dm.defense("clipping", max_norm=1e-3), Quiet(std=1e-3, share=0.0)), True),
        ((dm.defense("gaussian_noise", std=1e-3), dm.defense("pruning", ratio=0.9)), False),
        ((dm.defense("laplace_noise", scale=1e-3),), False),
        ((dm.defense("quantisation", bits=8),), False),
    ],
)
def test_declared_noise_must_show_in_the_sum_of_the_rows(defenses, missing):
    _, change, public = sent(*defenses)
    assert bool(missing_noise(change.double(), public)) == missing
