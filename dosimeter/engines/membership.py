"""Is a known sample in the batch? Spans of a layer's gradient answer it exactly, a likelihood behind noise; and what noise allows."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.bounds.reconstruction_robustness import SuccessBound, success_bound

ROUNDING_SLACK = 64.0  # how many roundings of an entry the errors of a long sum may reach
CLAIMED_SHARE = 1 / 16  # of the error bar, within which a candidate is claimed: far above what rounding does, below what others reach
LARGEST_ERROR_BAR = 0.01  # a layer whose rounding may move a residual further decides nothing


@dataclass(frozen=True, kw_only=True)
class SpanTest:
    """How far each candidate is from being one of the layer's samples."""

    layer: str
    distances: Tensor  # (n,) 0 for a member, up to `error_bar`
    error_bar: float  # what rounding may add to a member's distance
    rank: int
    room: int  # the layer's narrower side: beyond it every sample fits


def span_test(layer: str, sent: Tensor, terms: Tensor, *, batch_size: int, positions: int) -> SpanTest | None:
    """The test on a layer's gradient `sent` (m, n), with each candidate's own in `terms` (k, m, n); None where it decides nothing.

    Ours. `sent` is G = (1/B) Σ gᵢ over the samples, and each gᵢ has rank P, the number of `positions`. If G has rank B·P, then the gᵢ are
    independent. Then G⁺ maps each gᵢ/B to a projection of rank P (Wedderburn's rank reduction): rows and columns of gᵢ lie in those of G,
    and tr G⁺gᵢ = B·P. A sample outside the batch fits only if its own features and errors lie in the span of the batch's, with the right
    length.
    """
    left, values, right = torch.linalg.svd(sent.double(), full_matrices=False)
    room, rank = min(sent.shape), batch_size * positions
    if rank >= room or values[rank - 1] <= 0:
        return None
    rounding = ROUNDING_SLACK * torch.finfo(sent.dtype).eps * float(values[0])
    if float(values[rank]) > rounding:  # more samples than declared, or an update that is no sum of such terms
        return None
    error_bar = 2 * rounding / float(values[rank - 1])
    if error_bar > LARGEST_ERROR_BAR:
        return None
    left, kept, right = left[:, :rank], values[:rank], right[:rank]  # (m, r), (r,), (r, n)
    terms = terms.double()
    norms = terms.flatten(1).norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
    outside_rows = (terms - terms @ right.mT @ right).flatten(1).norm(dim=1) / norms
    outside_columns = (terms - left @ (left.mT @ terms)).flatten(1).norm(dim=1) / norms
    inside = torch.einsum("mr,kmn,rn->kr", left, terms, right)  # diagonal of leftᵀ g rightᵀ
    share = (inside / kept).sum(1) / rank  # tr G⁺g / (B·P)
    silent = terms.flatten(1).norm(dim=1) <= rounding  # a candidate that leaves no trace can be neither found nor excluded
    distances = torch.stack((outside_rows, outside_columns, (share - 1).abs())).amax(0)
    return SpanTest(layer=layer, distances=torch.where(silent, torch.nan, distances), error_bar=error_bar, rank=rank, room=room)


def likelihood_scores(sent: Mapping[str, Tensor], terms: Mapping[str, Tensor], floors: Mapping[str, float], batch_size: int) -> Tensor:
    """For each candidate, the log-likelihood of the update with the candidate's term in it over that without, other samples left out: (k,).

    Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022 (LiRA): a likelihood ratio a sample.
    Departure: the noise is known, so that no shadow models are trained. The ratio is
    Σ (⟨u, t⟩ − ‖t‖²/2) / σ² for the update u, the candidate's term t = g/B and the noise σ of each layer.
    """
    total = 0.0
    for name, floor in floors.items():
        term = terms[name].double().flatten(1) / batch_size  # (k, entries)
        seen = sent[name].double().flatten()
        total = total + (term @ seen - term.square().sum(1) / 2) / floor**2
    return torch.as_tensor(total)


def true_positive_bound(false_positive_rate: float, *, noise_multiplier: float, steps: int = 1, replaced: bool = True) -> SuccessBound:
    """The largest share of members that any test finds, at a share of false alarms, behind clipping and Gaussian noise.

    Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022, the trade-off function of the Gaussian mechanism: Φ(Φ⁻¹(α) + μ) with
    μ = √steps / σ where the sample is left out, and twice that where another one is in its place (`replaced`), which moves the sum by up to
    twice the clipping norm. It is the same trade-off as in reconstruction robustness.
    """
    moved = noise_multiplier / 2 if replaced else noise_multiplier
    return success_bound(noise_multiplier=moved, chance=false_positive_rate, steps=steps)


def operating_points(members: Tensor, others: Tensor, rates: tuple[float, ...]) -> dict[float, float]:
    """The share of members found at each share of false alarms: the threshold lets at most that share of the others pass."""
    found = {}
    for rate in rates:
        allowed = math.floor(rate * len(others))
        if allowed < 1:
            continue  # too few others to measure so small a share
        threshold = others.sort(descending=True).values[allowed] if allowed < len(others) else torch.tensor(-math.inf)
        found[rate] = float((members > threshold).double().mean())
    return found
