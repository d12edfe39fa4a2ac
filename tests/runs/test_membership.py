"""Is a known sample in the batch: exactly by spans, by a likelihood behind noise, and never better than differential privacy allows."""

import math
from dataclasses import replace

import pytest
import torch
from scipy.special import ndtr, ndtri
from torch import nn

import dosimeter as dm
from dosimeter.client.gradients import per_sample_gradients
from dosimeter.engines.membership.estimate import true_positive_bound
from dosimeter.engines.membership.likelihood import likelihood_scores
from dosimeter.metrics.membership_rates import found_at

NETS = {
    "head": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 12)),
    "hidden": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.ReLU(), nn.Linear(16, 3)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(3, 16, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)),
}


def _candidates(seed, classes, count=24):
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(count, 3, 4, 4, generator=rng), torch.randint(0, classes, (count,), generator=rng))


def _part(batch, chosen):
    return dm.Batch(batch.inputs[chosen], batch.targets[chosen])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", NETS)
def test_spans_tell_every_member_from_every_other_sample(kind, seed):
    torch.manual_seed(seed)
    model = NETS[kind]()
    candidates = _candidates(seed, 12 if kind == "head" else 3)
    batch = 5
    found = dm.test_membership(dm.observe(model, _part(candidates, slice(batch))), candidates)
    assert found.test == "spans"
    assert found.members.tolist() == [True] * batch + [False] * (24 - batch)
    assert found.excluded.tolist() == [False] * batch + [True] * (24 - batch)
    assert found.scores[:batch].min() > found.scores[batch:].max()
    assert found.error_bar is not None
    assert 0 < found.error_bar < 0.01


def test_a_mixture_of_members_is_no_member():
    """Its features lie in the span of a linear layer that reads pixels; its share of the gradient does not fit."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 12))
    candidates = _candidates(4, 12)
    mixed = dm.Batch(torch.cat((candidates.inputs[:4], candidates.inputs[:4].mean(0, keepdim=True))), candidates.targets[[0, 1, 2, 3, 0]])
    found = dm.test_membership(dm.observe(model, _part(candidates, slice(4))), mixed)
    assert found.members.tolist() == [True, True, True, True, False]


def test_a_near_copy_of_a_member_is_not_claimed():
    """Half a per cent of noise on a member, on nets whose rounding leaves a wide error bar."""
    for seed in range(6):
        torch.manual_seed(seed)
        model, candidates = NETS["convolution"](), _candidates(seed, 3)
        near = dm.Batch(candidates.inputs[:1] * (1 + 5e-3 * torch.randn(1, 3, 4, 4)), candidates.targets[:1])
        exposure = dm.observe(model, _part(candidates, slice(6)))
        assert dm.test_membership(exposure, _part(candidates, slice(1))).members.tolist() == [True]
        assert dm.test_membership(exposure, near).members.tolist() == [False]


def test_a_batch_that_fills_every_layer_is_refused_and_so_are_unknown_sizes_and_local_steps():
    torch.manual_seed(0)
    model, candidates = NETS["hidden"](), _candidates(0, 3)
    with pytest.raises(dm.Refused, match="no layer has more room than a batch of 20"):
        dm.test_membership(dm.observe(model, _part(candidates, slice(20))), candidates)
    with pytest.raises(dm.Refused, match="batch size"):
        dm.test_membership(dm.observe(model, _part(candidates, slice(4)), declare_batch_size=False), candidates)
    averaged = dm.FedAvg(steps=2, learning_rate=0.1)
    with pytest.raises(dm.Refused, match="mean over samples"):
        dm.test_membership(dm.observe(model, _part(candidates, slice(4)), training=averaged), candidates)
    pruned = dm.observe(model, _part(candidates, slice(4)), defenses=(dm.defense("pruning", ratio=0.5),))
    with pytest.raises(dm.Refused, match="pruning"):
        dm.test_membership(pruned, candidates)


def test_behind_little_noise_members_score_higher_and_nothing_is_proved():
    torch.manual_seed(2)
    model, candidates = NETS["head"](), _candidates(7, 12)
    noisy = dm.observe(model, _part(candidates, slice(4)), defenses=(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.01),))
    found = dm.test_membership(noisy, candidates)
    assert found.test == "likelihood"
    assert not found.members.any()
    assert not found.excluded.any()
    assert found.scores[:4].mean() > found.scores[4:].mean() + found.scores[4:].std()
    assert found.bound(0.1, replaced=False).value == pytest.approx(float(ndtr(ndtri(0.1) + 1 / 0.01)))
    plain = dm.test_membership(
        dm.observe(model, _part(candidates, slice(4)), defenses=(dm.defense("gaussian_noise", std=0.1),)), candidates
    )
    with pytest.raises(dm.Refused, match="clipped update"):
        plain.bound(0.1)


def test_the_likelihood_is_the_difference_of_two_gaussian_densities():
    torch.manual_seed(0)
    sent, term, floor = torch.randn(6, dtype=torch.float64), torch.randn(1, 6, dtype=torch.float64), 0.7
    density = torch.distributions.Normal(torch.zeros(6, dtype=torch.float64), floor)
    direct = (density.log_prob(sent - term[0] / 3) - density.log_prob(sent)).sum()
    assert likelihood_scores({"w": sent}, {"w": term}, {"w": floor}, 3).item() == pytest.approx(float(direct), rel=1e-9)


@pytest.mark.parametrize("noise", [0.3, 1.0, 3.0])
def test_no_test_finds_more_members_than_differential_privacy_allows(noise):
    """4,000 updates of DP-SGD with and without one sample, the rest known: the best test beside the Gaussian trade-off."""
    torch.manual_seed(0)
    model, samples = NETS["head"](), _candidates(9, 12, count=1)
    gradients = per_sample_gradients(model, samples.inputs, samples.targets, dm.CrossEntropy())
    flat = torch.cat([rows.flatten(1) for rows in gradients.values()], 1).double().detach()
    term = flat / flat.norm().clamp(min=1.0)  # clipped to a norm of 1
    draws, rng = 4000, torch.Generator().manual_seed(5)
    noises = noise * torch.randn(2, draws, term.shape[1], generator=rng, dtype=torch.float64)
    without = torch.stack([likelihood_scores({"w": u}, {"w": term}, {"w": noise}, 1)[0] for u in noises[0]])
    present = torch.stack([likelihood_scores({"w": u + term[0]}, {"w": term}, {"w": noise}, 1)[0] for u in noises[1]])
    scores, inside = torch.cat((present, without)), torch.arange(2 * draws) < draws
    for rate in (0.01, 0.1):
        found = float(found_at(rate, scores, inside, "test"))
        bound = true_positive_bound(rate, noise_multiplier=noise, replaced=False).value
        slack = 4 * math.sqrt(max(bound * (1 - bound), 0.01) / draws) + 4 * math.sqrt(rate / draws) * 3
        assert found <= bound + slack
        if float(term.norm()) > 0.999:
            assert found >= bound - slack  # a clipped sample meets the bound: it is tight


def test_operating_points_by_hand():
    scores = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.5, 2.5, 3.5, 9.0])
    inside = torch.arange(8) > 3
    found = {rate: float(found_at(rate, scores, inside, "test")) for rate in (0.01, 0.25, 0.5, 1.0)}
    assert found == {0.01: 0.5, 0.25: 0.75, 0.5: 1.0, 1.0: 1.0}
    assert float(found_at(0.1, scores.index_fill(0, torch.tensor([7]), torch.nan), inside, "test")) == 0.25  # no trace: not found


def test_a_gradient_with_more_directions_than_the_declared_size_gives_refutes_the_size():
    """The head of two classes shows one direction of any batch; the layer before it shows three."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Flatten(), nn.Linear(48, 16), nn.Tanh(), nn.Linear(16, 2))
    batch = dm.Batch(torch.rand(3, 3, 4, 4), torch.tensor([0, 1, 1]))
    exposure = dm.observe(model, batch)
    assert bool(dm.test_membership(exposure, batch).members.all())
    told = replace(exposure, public=replace(exposure.public, batch_size=1))
    with pytest.raises(dm.Refused, match="more directions than 1 samples give it"):
        dm.test_membership(told, batch)


def test_candidates_of_another_precision_are_refused(classifier, batch):
    exposure = dm.observe(classifier, batch)
    with pytest.raises(TypeError, match=r"candidates\.inputs: expected torch\.float32"):
        dm.test_membership(exposure, dm.Batch(batch.inputs.double(), batch.targets))
    with pytest.raises(TypeError, match="batch: expected a Batch, got tuple"):
        dm.inspect(classifier, batch=(batch.inputs, batch.targets))
    with pytest.raises(TypeError, match="folder: expected the path of a folder"):
        dm.read(None)


def test_candidates_that_the_model_does_not_take_are_refused():
    torch.manual_seed(0)
    known = _candidates(0, 3, 4)
    exposure = dm.observe(NETS["hidden"](), known)
    wrong = {
        "expected real numbers, got torch.complex64": dm.Batch(known.inputs.to(torch.complex64), known.targets),
        "model: cannot take": dm.Batch(known.inputs[:, :, :3], known.targets),
        "class ids must lie in": dm.Batch(known.inputs, known.targets + 3),
        "has NaN or infinite values": dm.Batch(known.inputs * torch.nan, known.targets),
    }
    for sentence, candidates in wrong.items():
        with pytest.raises(ValueError, match=sentence):
            dm.test_membership(exposure, candidates)
