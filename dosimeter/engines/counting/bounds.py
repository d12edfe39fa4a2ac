"""How many samples each class has at the very least: by signs, by auxiliary samples, by elimination, by taking the gradient apart."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor
from torch.nn.functional import one_hot, softmax

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.engines.counting.auxiliary import logits_in_chunks
from dosimeter.engines.counting.counts import feigned, least_counts
from dosimeter.engines.subspace.problem import find_sure_samples
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head

INEXACT = 1e-3  # relative error of a sample that is taken off
SMALLEST_ROW = 1e-9  # of the whole gradient, below which a row is no longer scaled up
RANK_GAP = 10.0  # between the last singular value of a sample and the first of rounding
OPPOSITE = 0.25  # share of the wrong sign that rounding may leave in an eliminated vector
ROUNDED_OFF = 0.5  # relative to the label's entry, what the others' sum may lack of it: a p of nearly 1 rounds the entry p − 1, or to 0
CROWDED = 0.5  # samples' worth of other samples' probability at an unseen label, from which on elimination is not believed


@dataclass(frozen=True, kw_only=True)
class Bounds:
    """Least counts (C,), and whether the gradient alone proves them."""

    least: Tensor
    proved: bool

    def leave(self, size: int) -> int:
        """How many of the samples have no class yet."""
        return size - int(self.least.sum())

    def sharpened(self, least: Tensor, size: int) -> Bounds:
        """These and others at once, which are not proved; these alone where both ask for more samples than there are."""
        both = torch.maximum(self.least, least)
        if int(both.sum()) > size or torch.equal(both, self.least):
            return self
        return Bounds(least=both, proved=False)


def bounds(exposure: Exposure, head: Head, features: Tensor, rng: Generator, *, method: str) -> Bounds:
    """The sharpest bounds that are needed: each rule is asked only where those before leave samples without a class.

    1. Signs (`counting.least_counts`), a proof. 2. The batch gives a class at least B times the probability that the auxiliary sample
    with the smallest gives it: sharp on untrained networks, whose probabilities hardly vary. 3. Elimination, where labels are all
    different. 4. Samples that the gradient is taken apart into (`successive_projection.py`), signs of what is left without them, and
    elimination once more.
    """
    public, size = exposure.public, exposure.public.batch_size
    assert size is not None
    found = Bounds(least=least_counts(head, size, public.loss), proved=True)
    if not isinstance(public.loss, CrossEntropy) or public.loss.smoothing > 0 or head.bias_gradient is None:
        return found
    if found.leave(size):
        found = found.sharpened(_by_auxiliary(head, features, size, public.loss.temperature), size)
    determined = 2 * size < head.classes and size < head.features  # more equations than unknowns for each sample
    if not determined or not isinstance(public.training, FedSGD) or public.defenses:
        return found
    if found.leave(size):
        mass = size * public.loss.temperature * head.bias_gradient.double()
        found = found.sharpened(_by_elimination(head, found.least, size, mass), size)
    if found.leave(size):
        least, mass = _by_samples(exposure, head, rng, size, method=method)
        found = found.sharpened(least, size)
        found = found.sharpened(_by_elimination(head, found.least, size, mass), size)
    return found


def _by_auxiliary(head: Head, features: Tensor, size: int, temperature: float) -> Tensor:
    """n_k = Σ_i p_ik − B τ ∇b_k, with no p_ik below the smallest of an auxiliary sample: (C,)."""
    assert head.bias_gradient is not None
    gradient = temperature * head.bias_gradient.double()
    smallest = torch.full_like(gradient, torch.inf)
    for _, logits in logits_in_chunks(head, features):
        smallest = torch.minimum(smallest, softmax(logits / temperature, 1).amin(0))
    return (size * (smallest - gradient) - feigned(head.bias_gradient, size)).ceil().clamp_min(0)


def _by_elimination(head: Head, least: Tensor, size: int, mass: Tensor) -> Tensor:
    """Add the classes that signs do not show, of samples whose classes are all different: (C,).

    The column space of ∇W holds every dᵢ = pᵢ − yᵢ, of which only the label's entry is negative. A vector of it that vanishes at all
    classes seen is, up to a factor, d_j + Σ αᵢ dᵢ for a sample j of a class unseen, with αᵢ ≥ 0: what cancels the probability at a
    label seen is negative there and nowhere else. So still only the label's own entry is negative, and is minus the sum of all
    others: with several such j their rows of a basis span the largest volume, which pivoting finds. Then signs must be right,
    and other samples, but known ones, may give the class little probability (`mass`, (C,)): else this may be the difference of two
    samples of one class.
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
    believed = (opposite < OPPOSITE) & (off_one < ROUNDED_OFF) & (mass[unseen] < CROWDED) & (tails >= 0)
    return least.index_fill(0, unseen[believed], 1)


def _shares(vanishing: Tensor, unseen: Tensor) -> tuple[Tensor, Tensor]:
    """Of each unseen label (m,), how the other classes share its entry (C, m), and what all but the largest of them have (m,).

    Where the label's entry and one other are nearly all of a vector, rounding may have made the other the larger one, and so been taken
    for the label; the rest then has the wrong sign.
    """
    solved, failed = torch.linalg.solve_ex(vanishing[unseen].T, -vanishing.T)
    shares = solved.T.index_fill(0, unseen, 0)
    if int(failed):
        shares = torch.full_like(shares, -torch.inf)
    return shares, shares.sum(0) - shares.amax(0)


def _largest_volume(rows: Tensor) -> Tensor:
    """As many of the rows (C, m) as there are columns: the longest, the longest off that one, and so on: (m,)."""
    picked = []
    for _ in range(rows.shape[1]):
        picked.append(rows.square().sum(1).argmax())
        direction = rows[picked[-1]] / torch.linalg.vector_norm(rows[picked[-1]]).clamp_min(torch.finfo(rows.dtype).tiny)
        rows = rows - (rows @ direction)[:, None] * direction
    return torch.stack(picked)


def _by_samples(exposure: Exposure, head: Head, rng: Generator, size: int, *, method: str) -> tuple[Tensor, Tensor]:
    """The labels of samples that the gradient comes apart into and what signs show of the rest; and Σ (p − y) of the rest: (C,), (C,)."""
    loss = exposure.public.loss
    assert isinstance(loss, CrossEntropy)
    assert head.weight_gradient is not None
    assert head.bias_gradient is not None
    features, labels = find_sure_samples(exposure, head, rng, method=method)
    counts, left = torch.bincount(labels, minlength=head.classes).double(), size - len(labels)
    errors = softmax(head.logits(features) / loss.temperature, 1) - one_hot(labels, head.classes)  # (n, C)
    weight = size * loss.temperature * head.weight_gradient.double() - errors.T @ features
    inexact = INEXACT * errors.abs().T @ features.abs()
    bias = size * loss.temperature * head.bias_gradient.double() - errors.sum(0)
    weight = torch.where(weight.abs() > inexact, weight, 0.0)
    rest = replace(head, weight_gradient=weight, bias_gradient=bias / (max(left, 1) * loss.temperature))
    return counts + least_counts(rest, left, loss), bias
