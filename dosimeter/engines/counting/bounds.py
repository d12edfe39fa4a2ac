"""Lower bounds on the classes' counts: by signs, by auxiliary samples, by elimination, and by samples read off the gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot, softmax

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.engines.counting.auxiliary import logits_in_chunks
from dosimeter.engines.counting.counts import least_counts, rounding_slack
from dosimeter.engines.subspace.problem import find_sure_samples
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head

SAMPLE_ERROR = 1e-3  # relative error of a sample that is subtracted from the gradient
SMALLEST_ROW = 1e-9  # of the whole gradient's norm: smaller rows are not scaled up to unit length
RANK_GAP = 10.0  # factor between the smallest singular value of the samples and the largest of rounding
WRONG_SIGN = 0.25  # share of an eliminated vector that may have the wrong sign from rounding
SUM_TOLERANCE = 0.5  # how far the other entries may sum from minus the label's, relative: where p is nearly 1, p − 1 is rounded
CROWDED = 0.5  # probability that other samples give an unseen label in sum, from which on elimination is not trusted


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least counts (C,), and whether the gradient alone proves them."""

    least: Tensor
    proved: bool

    def leave(self, size: int) -> int:
        """How many samples have no class yet."""
        return size - int(self.least.sum())

    def sharpen(self, least: Tensor, size: int) -> Bounds:
        """These bounds and `least`, which is not proved; these alone where both together exceed the batch size."""
        both = torch.maximum(self.least, least)
        if int(both.sum()) > size or torch.equal(both, self.least):
            return self
        return Bounds(least=both, proved=False)


def bounds(exposure: Exposure, head: Head, features: Tensor, rng: Generator, *, method: str) -> Bounds:
    """The sharpest bounds that are needed: a rule runs only where the rules before it leave samples without a class.

    1. Signs (`counts.least_counts`), a proof. 2. The batch gives a class at least B times the smallest probability that an auxiliary
    sample gives it. This is sharp on untrained networks, whose probabilities hardly vary. 3. Elimination, where labels are all
    different. 4. Samples that the gradient is separated into (`successive_projection.py`), signs of what is left without them, and
    elimination once more.
    """
    public, size = exposure.public, exposure.public.batch_size
    assert size is not None
    found = Bounds(least=least_counts(head, size, public.loss), proved=True)
    if not isinstance(public.loss, CrossEntropy) or public.loss.smoothing > 0 or head.bias_gradient is None:
        return found
    if found.leave(size):
        found = found.sharpen(_by_auxiliary(head, features, size, public.loss.temperature), size)
    determined = 2 * size < head.classes and size < head.features  # more equations than unknowns for each sample
    if not determined or not isinstance(public.training, FedSGD) or public.defenses:
        return found
    if found.leave(size):
        mass = size * public.loss.temperature * head.bias_gradient.double()
        found = found.sharpen(_by_elimination(head, found.least, size, mass), size)
    if found.leave(size):
        least, mass = _by_samples(exposure, head, rng, size, method=method)
        found = found.sharpen(least, size)
        found = found.sharpen(_by_elimination(head, found.least, size, mass), size)
    return found


def _by_auxiliary(head: Head, features: Tensor, size: int, temperature: float) -> Tensor:
    """n_k = Σ_i p_ik − B τ ∇b_k, with every p_ik at least the smallest of an auxiliary sample: (C,)."""
    assert head.bias_gradient is not None
    gradient = temperature * head.bias_gradient.double()
    smallest = torch.full_like(gradient, torch.inf)
    for _, logits in logits_in_chunks(head, features):
        smallest = torch.minimum(smallest, softmax(logits / temperature, 1).amin(0))
    return (size * (smallest - gradient) - rounding_slack(head.bias_gradient, size)).ceil().clamp_min(0)


def _by_elimination(head: Head, least: Tensor, size: int, mass: Tensor) -> Tensor:
    """Add the classes that signs do not show, of samples whose classes are all different: (C,).

    The column space of ∇W contains every dᵢ = pᵢ − yᵢ. Only the label's entry of dᵢ is negative. For a sample j of an unseen class,
    eliminate its entries at all seen classes: d_j + Σ αᵢ dᵢ. Each cancelled entry is positive, so αᵢ ≥ 0, and again only label j's
    entry is negative. It is minus the sum of all others, hence the largest. With several such j, pivoting finds the basis rows of
    largest volume.
    An answer needs the right signs, and little probability of its class elsewhere (`mass`, (C,)). Otherwise it may be the difference of
    two samples of one class.
    """
    assert head.weight_gradient is not None
    seen = torch.nonzero(least > 0).flatten()
    if bool((least > 1).any()) or len(seen) >= size:
        return least
    gradient = head.weight_gradient.double()
    scale = torch.linalg.vector_norm(gradient, dim=1, keepdim=True).clamp_min(SMALLEST_ROW * torch.linalg.vector_norm(gradient))
    left, values, _ = torch.linalg.svd(gradient / scale, full_matrices=False)  # rows round in proportion to their size
    if float(values[size - 1]) < RANK_GAP * float(values[size]):
        return least
    columns = left[:, :size] * scale  # (C, B)
    vanishing = columns @ torch.linalg.qr(columns[seen].T, mode="complete").Q[:, len(seen) :]  # (C, m)
    unseen = _largest_volume(vanishing.index_fill(0, seen, 0))  # (m,)
    shares, tails = _shares(vanishing, unseen)
    unseen = torch.where(tails < 0, shares.argmax(0), unseen)
    shares, tails = _shares(vanishing, unseen)
    opposite, off_one = -shares.clamp_max(0).sum(0), (shares.sum(0) - 1).abs()
    believed = (opposite < WRONG_SIGN) & (off_one < SUM_TOLERANCE) & (mass[unseen] < CROWDED) & (tails >= 0)
    return least.index_fill(0, unseen[believed], 1)


def _shares(vanishing: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """How the other classes share each unseen label's entry (C, m), and the sum of all shares but the largest (m,).

    Where two entries make up nearly all of a vector, rounding may make the wrong one larger, which is then taken for the label.
    The remaining entries then have the wrong sign.
    """
    solved, failed = torch.linalg.solve_ex(vanishing[unseen].T, -vanishing.T)
    shares = solved.T.index_fill(0, unseen, 0)
    if int(failed):
        shares = torch.full_like(shares, -torch.inf)
    return shares, shares.sum(0) - shares.amax(0)


def _largest_volume(rows: Tensor) -> Tensor:
    """Indices of m of the rows (C, m) that span a large volume: the longest, then the longest orthogonal to it, and so on: (m,)."""
    picked = []
    for _ in range(rows.shape[1]):
        picked.append(rows.square().sum(1).argmax())
        direction = rows[picked[-1]] / torch.linalg.vector_norm(rows[picked[-1]]).clamp_min(torch.finfo(rows.dtype).tiny)
        rows = rows - (rows @ direction)[:, None] * direction
    return torch.stack(picked)


def _by_samples(exposure: Exposure, head: Head, rng: Generator, size: int, *, method: str) -> tuple[Tensor, Tensor]:
    """Counts of the samples that the gradient is separated into, plus the rest's bounds by signs; and Σ (p − y) of the rest: (C,), (C,)."""
    loss = exposure.public.loss
    assert isinstance(loss, CrossEntropy)
    assert head.weight_gradient is not None
    assert head.bias_gradient is not None
    features, labels = find_sure_samples(exposure, head, rng, method=method)
    counts, left = torch.bincount(labels, minlength=head.classes).double(), size - len(labels)
    errors = softmax(head.logits(features) / loss.temperature, 1) - one_hot(labels, head.classes)  # (n, C)
    weight = size * loss.temperature * head.weight_gradient.double() - errors.T @ features
    subtraction_error = SAMPLE_ERROR * errors.abs().T @ features.abs()
    bias = size * loss.temperature * head.bias_gradient.double() - errors.sum(0)
    weight = torch.where(weight.abs() > subtraction_error, weight, 0.0)
    rest = replace(head, weight_gradient=weight, bias_gradient=bias / (max(left, 1) * loss.temperature))
    return counts + least_counts(rest, left, loss), bias
