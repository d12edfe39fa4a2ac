"""A sample's share of the gradient has an error bar of its own, and the verdict keeps to it."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.certificate import assess
from dosimeter.engines.subspace.equations import build_equations, probabilities, slopes, transposed_slopes, whole_span
from dosimeter.engines.subspace.single import polish
from dosimeter.engines.subspace.spectrum import factor
from dosimeter.engines.subspace.verdict import BatchFacts, hidden_difference, judge, label_blends

APART = 1e-3  # relative distance of the two samples that are alike
NOISE = 1e-9


@pytest.fixture
def noisy(rng):
    """() -> equations, coordinates of the truth, labels; four samples, the first two alike under two labels, the noise anew each time."""

    def draw(*shape):
        return torch.randn(*shape, generator=rng, dtype=torch.float64)

    weight, bias = draw(40, 60) / math.sqrt(180), draw(40) / math.sqrt(60)
    features, labels = torch.relu(draw(60) + draw(4, 60)), torch.tensor([5, 12, 7, 30])
    features[1] = features[0] * (1 + APART * draw(60))
    error = torch.softmax(features @ weight.T + bias, 1) - one_hot(labels, 40)

    def build():
        spectrum = factor(error.T @ features / 4 + NOISE * draw(40, 60), 1e-16, rng, at_most=4)
        return build_equations(spectrum, weight, bias, model_unit=2e-16), features @ spectrum.right.T / spectrum.values, labels

    return build


def verdict(equations, t, labels, mass, mass_bar, *, batch_size: int | None = 4, free_scale: bool = False):
    small, yes = torch.full_like(mass, 1e-6), torch.ones_like(mass, dtype=torch.bool)
    terms = BatchFacts(batch_size=batch_size, free_scale=free_scale, non_negative=False)
    return judge(equations, t, labels, small, small, yes, mass, mass_bar, yes, terms)


def test_what_is_pulled_through_the_slopes_needs_none_of_them(noisy):
    equations, t, _ = noisy()
    p, rows = probabilities(equations, whole_span(equations), t), torch.linspace(-1, 1, 160, dtype=torch.float64).view(4, 40)
    expected = torch.einsum("ncr,nc->nr", slopes(equations, whole_span(equations), p), rows)
    torch.testing.assert_close(transposed_slopes(equations, whole_span(equations), p, rows), expected)


@pytest.mark.parametrize("blends", [False, True])
def test_the_mass_scatters_as_its_bar_says(noisy, blends):
    """Repeated noise on one gradient; alike samples have exact features and a mass that is hardly known."""
    off, bars = [], []
    for _ in range(30):
        equations, t, labels = noisy()
        equations = replace(equations, blends=blends)
        labels = labels * 41 if blends else labels
        t, inverse = polish(equations, whole_span(equations), t, labels, steps=6)
        single = assess(equations, t, labels, inverse)
        off.append((single.mass - 4).abs())
        bars.append(single.mass_bar)
    off, bars = torch.stack(off), torch.stack(bars)
    ratios = off / bars
    assert float(ratios.max()) < 1
    assert bool((ratios.square().mean(0).sqrt() > 0.02).all())  # one eighth, were the noise model perfect
    assert float(bars[:, :2].min()) > 30 * float(bars[:, 2:].max())
    assert float(off[:, :2].mean()) > 30 * float(off[:, 2:].mean())


def test_a_share_off_a_whole_number_by_more_than_its_bar_refutes_the_sample(noisy):
    equations, t, labels = noisy()
    mass = torch.tensor([4.05, 4.05, 4.0, 4.0], dtype=torch.float64)
    found = verdict(equations, t, labels, mass, torch.tensor([0.004, 0.1, 0.004, 0.1], dtype=torch.float64))
    assert found.certified.tolist() == [False, True, True, True]
    assert found.times.tolist() == [1, 1, 1, 1]


def test_where_the_scale_is_free_the_bar_of_the_sample_that_sets_it_counts_too(noisy):
    equations, t, labels = noisy()
    mass = torch.tensor([4.05, 4.0, 4.0, 4.0], dtype=torch.float64)
    narrow, wide = torch.full_like(mass, 0.004), torch.tensor([0.1, 0.004, 0.004, 0.004], dtype=torch.float64)
    assert not bool(verdict(equations, t, labels, mass, narrow, free_scale=True).certified[1:].any())
    assert bool(verdict(equations, t, labels, mass, wide, free_scale=True).certified.all())


@pytest.mark.parametrize(
    ("batch_size", "free_scale", "expected"),
    [(4, False, [True] * 4), (4, True, [True] * 4), (None, False, [False, False, True, True]), (None, True, [False, False, True, True])],
)
def test_shares_that_copies_could_have_need_a_batch_size(noisy, batch_size, free_scale, expected):
    """A half and a third may be two and three copies of one input under two labels, an odd share and a class alone may not."""
    equations, t, labels = noisy()
    equations = replace(equations, blends=True)
    pairs = labels * 40 + 1
    _, inverse = polish(equations, whole_span(equations), t, pairs, steps=0)
    share = torch.tensor([1 / 2, 1 / 3, 0.2357, 0.0], dtype=torch.float64)
    single = replace(assess(equations, t, pairs, inverse), second_share=share, second_bar=torch.full_like(share, 1e-5))
    terms = BatchFacts(batch_size=batch_size, free_scale=free_scale, non_negative=False)
    result = replace(verdict(equations, t, pairs, torch.full_like(share, 4.0), 0 * share), certified=torch.ones(4, dtype=torch.bool))
    assert label_blends(equations, result, pairs, single, terms).certified.tolist() == expected


def test_a_sample_that_occurs_twice_may_be_two_similar_ones(noisy):
    """Its error bar allows for the largest difference that hides in the noise of the batch."""
    equations, t, labels = noisy()
    mass, bar = torch.tensor([2.5, 5.0, 5.0, 5.0], dtype=torch.float64), torch.full((4,), 1e-3, dtype=torch.float64)
    found = verdict(equations, t, labels, mass, bar, batch_size=5)
    assert found.times.tolist() == [2, 1, 1, 1]
    expected = torch.hypot(
        torch.full_like(mass, 1e-6), hidden_difference(equations, t, 5) / torch.linalg.vector_norm(found.features, dim=1)
    )
    torch.testing.assert_close(found.error_bar[:1], expected[:1])
    assert found.error_bar[1:].tolist() == [1e-6] * 3


def test_what_copies_may_hide_grows_with_the_batch_and_is_lost_in_the_noise(rng):
    """Two samples f ± δ of a random direction just beyond the bound leave a singular value above the threshold."""
    weight, bias = torch.randn(40, 60, generator=rng, dtype=torch.float64) / math.sqrt(180), torch.zeros(40, dtype=torch.float64)
    features, labels = torch.rand(3, 60, generator=rng, dtype=torch.float64), torch.tensor([5, 12, 7])
    error = torch.softmax(features @ weight.T + bias, 1) - one_hot(labels, 40)
    spectrum = factor((error.T @ features / 4).float().double(), 6e-8, rng)
    equations = build_equations(spectrum, weight, bias, model_unit=1.2e-7)
    t = features @ spectrum.right.T / spectrum.values
    hidden = hidden_difference(equations, t, 4)
    torch.testing.assert_close(hidden_difference(equations, t, 16), 2 * hidden)
    apart = torch.randn(60, generator=rng, dtype=torch.float64)
    apart = apart / apart.norm() * hidden[0] * 1.5
    both = torch.cat([features + torch.stack([apart, 0 * apart, 0 * apart]), features[:1] - apart])
    names = torch.cat([labels, labels[:1]])
    gradient = (torch.softmax(both @ weight.T + bias, 1) - one_hot(names, 40)).T @ both / 4
    assert factor(gradient.float().double(), 6e-8, rng).rank == 4
