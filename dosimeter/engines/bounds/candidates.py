"""The attacker that reconstruction robustness bounds: it knows everything but which of the candidates is in the data."""

from __future__ import annotations

import torch
from torch import Generator, Tensor


def identify(terms: Tensor, *, noise_multiplier: float, sample_rate: float = 1.0, trials: int, rng: Generator) -> Tensor:
    """Which candidate the attacker picks in each of `trials` runs of DP-SGD whose secret sample is candidate 0. (trials,)

    Hayes, Mahloujifar & Balle, "Bounding Training Data Reconstruction in DP-SGD", NeurIPS 2023: Section 3, the prior-aware attack. `terms`
    (steps, candidates, n) holds what each candidate adds to the sum of clipped gradients in each step, over the clipping norm. The attacker
    takes all that it knows off every noisy sum, and picks the candidate whose terms agree best with the rest.
    Departure: with all samples in each step the attacker compares likelihoods, not inner products, which differ where the terms' norms do.
    The noise is drawn in the span of the candidates' terms alone, since the rest of it tells nothing.
    """
    steps, candidates, _ = terms.shape
    total = torch.zeros(trials, candidates, dtype=torch.float64)
    for step in range(steps):
        inner = (terms[step] @ terms[step].T).to(torch.float64)  # (candidates, candidates)
        root = _root(inner)
        drawn = torch.rand(trials, generator=rng, dtype=torch.float64) < sample_rate
        noise = noise_multiplier * torch.randn(trials, candidates, generator=rng, dtype=torch.float64) @ root  # ⟨noise, term⟩
        seen = drawn[:, None] * inner[0] + noise  # ⟨rest of the noisy sum, term⟩
        shift = (seen - inner.diagonal() / 2) / noise_multiplier**2  # the log-likelihood ratio of each candidate's presence
        if sample_rate == 1:
            total += shift
        else:
            rate = torch.tensor(sample_rate, dtype=torch.float64)
            total += torch.logaddexp(torch.log1p(-rate), torch.log(rate) + shift)
    return total.argmax(1)


def _root(inner: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(inner)
    return vectors @ torch.diag(values.clamp(min=0).sqrt()) @ vectors.T
