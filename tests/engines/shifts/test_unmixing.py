"""Samples out of their mixtures: exact where maps have zeros, none where they have not."""

import numpy as np
import torch

from dosimeter.engines.shifts.unmixing import _Mixed, unmix


def test_unmixing_finds_sparse_maps_and_no_others():
    rng = torch.Generator().manual_seed(6)
    truth = torch.randn(4, 600, generator=rng, dtype=torch.float64).clamp_min(0)
    mixtures = torch.randn(4, 4, generator=rng, dtype=torch.float64) @ truth
    found = unmix(mixtures, torch.zeros_like(mixtures))
    assert found.certain.all()
    assert len(found.mixing) == 4
    directions, wanted = (x / x.norm(dim=1, keepdim=True) for x in (found.mixing @ mixtures, truth))
    assert torch.allclose((directions @ wanted.T).max(1).values, torch.ones(4, dtype=torch.float64), atol=1e-9)
    dense = torch.randn(4, 4, generator=rng, dtype=torch.float64) @ (truth + 1)
    assert len(unmix(dense, torch.zeros_like(dense)).mixing) == 0


def test_an_edge_that_mixes_many_samples_is_not_certain():
    """A wrong edge has one zero less than it mixes samples, and all the zeros of the samples that it leaves out: none of these fixes it."""
    rng = np.random.default_rng(2)
    samples, mixed = 20, 15
    others = np.repeat(np.eye(samples)[mixed:], 100, 0)  # entries in which one of the samples left out is active
    inside = np.zeros((700, samples))
    inside[:, :mixed] = rng.standard_normal((700, mixed))
    direction = np.zeros(samples)
    direction[:mixed] = 1 / np.sqrt(mixed)
    inside[: mixed - 1] -= np.outer(inside[: mixed - 1] @ direction, direction)  # balanced: as many as a vertex has
    inside[mixed - 1 :] *= np.sign(inside[mixed - 1 :] @ direction)[:, None]
    rows = np.concatenate([others, inside])
    found = _Mixed(rows=rows, errors=np.zeros_like(rows)).describe(direction)
    assert found.zeros >= 500
    assert found.witnesses < samples
    assert not found.certain


def test_zeros_must_be_as_narrow_as_the_noise():
    """A sample mixed with a little of another one has entries all over the band around zero; a sample's own zeros fill its middle."""
    rng = np.random.default_rng(3)
    samples, noise = 5, 1e-4
    rows = np.concatenate([rng.uniform(0.3, 1.0, (400, samples)), rng.uniform(0.3, 1.0, (400, samples))])
    direction = np.eye(samples)[0]
    errors = np.full(rows.shape, noise / 4)  # as much as the slack makes of it

    def described(heights: np.ndarray):
        rows[:400, 0] = heights
        return _Mixed(rows=rows, errors=errors).describe(direction)

    narrow, wide = described(noise * rng.normal(0, 0.3, 400)), described(noise * rng.uniform(-29, 29, 400))
    assert narrow.certain
    assert not wide.certain
    assert wide.error > 10 * narrow.error


def test_samples_that_are_zero_in_the_same_entries_are_left_out_with_the_count_that_a_proof_takes():
    rng = torch.Generator().manual_seed(8)
    shared = torch.rand(200, generator=rng, dtype=torch.float64) < 0.5
    truth = torch.rand(2, 200, generator=rng, dtype=torch.float64) * shared
    truth[0, shared.nonzero()[:4, 0]] = truth[1, shared.nonzero()[4:8, 0]] = 0  # four zeros of its own each
    found = unmix(truth, 1e-9 * torch.randn(2, 200, generator=rng, dtype=torch.float64))
    assert len(found.mixing) == 0
    assert found.doubtful is None or found.doubtful[0] <= 4 < found.doubtful[1]
    truth[0, shared.nonzero()[8:48, 0]] = truth[1, shared.nonzero()[48:88, 0]] = 0
    assert unmix(truth, 1e-9 * torch.randn(2, 200, generator=rng, dtype=torch.float64)).certain.tolist() == [True, True]


def test_mixtures_that_drown_in_their_errors_hold_no_samples():
    rng = torch.Generator().manual_seed(0)
    mixtures = torch.rand(3, 200, generator=rng, dtype=torch.float64)
    found = unmix(mixtures, 100 * torch.randn(3, 200, generator=rng, dtype=torch.float64))
    assert len(found.mixing) == 0


def test_mixtures_that_drown_in_their_errors_have_no_samples():
    rng = torch.Generator().manual_seed(2)
    mixtures = torch.randn(3, 60, generator=rng, dtype=torch.float64)
    assert len(unmix(mixtures, 100 * mixtures).mixing) == 0
