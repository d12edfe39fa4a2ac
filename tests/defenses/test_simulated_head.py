import pytest
import torch

import dosimeter as dm
from dosimeter.defenses.simulated_head import SimulatedHead
from dosimeter.types import Refused


@pytest.fixture
def gradient(rng):
    return torch.randn(30, 40, generator=rng) * torch.arange(1, 41) + 3


def test_shuffled_columns_keep_their_entries_and_lose_their_order(gradient, rng):
    shuffled = SimulatedHead().likeness(gradient, rng)
    assert torch.equal(shuffled.sort(0).values, gradient.sort(0).values)
    assert (shuffled != gradient).float().mean() > 0.9
    orders = [torch.stack([(gradient[:, c] == value).nonzero()[0, 0] for value in shuffled[:, c]]) for c in (0, 1)]
    assert not torch.equal(*orders)  # each column on its own


def test_statistics_are_kept(rng):
    gradient = torch.randn(4000, 3, generator=rng) * torch.tensor([1.0, 5.0, 0.1]) + torch.tensor([0.0, 2.0, -7.0])
    by_column = SimulatedHead(mode="column_statistics").likeness(gradient, rng)
    assert torch.allclose(by_column.mean(0), gradient.mean(0), atol=0.3)
    assert torch.allclose(by_column.std(0), gradient.std(0), rtol=0.1)
    whole = SimulatedHead(mode="statistics").likeness(gradient, rng)
    assert torch.allclose(whole.mean(0), gradient.mean().expand(3), atol=0.3)
    assert torch.allclose(whole.std(0), gradient.std().expand(3), rtol=0.1)


def test_half_of_the_entries_become_their_own_mean(gradient, rng):
    masked = SimulatedHead(mode="mask").likeness(gradient, rng)
    changed = masked != gradient
    assert 0.4 < changed.float().mean() < 0.6
    assert torch.allclose(masked[changed], gradient[changed].mean(), rtol=1e-5)


def test_only_the_head_changes_and_its_bias_stays_at_home(classifier, batch):
    plain = dm.observe(classifier, batch).update
    sent = dm.observe(classifier, batch, defenses=(SimulatedHead(),)).update
    assert plain.keys() - sent.keys() == {"5.bias"}
    assert not torch.equal(sent["5.weight"], plain["5.weight"])
    assert all(torch.equal(sent[name], plain[name]) for name in sent if name != "5.weight")


def test_refuses_without_the_head(classifier, batch):
    with pytest.raises(Refused, match="withholds it"):
        dm.observe(classifier, batch, defenses=(dm.defense("head_withheld"), SimulatedHead()))


def test_a_head_whose_weight_is_shared_is_refused(tied, batch):
    with pytest.raises(dm.Refused, match=r"'head\.weight' is shared"):
        dm.observe(tied, batch, defenses=(dm.defense("simulated_head"),))
