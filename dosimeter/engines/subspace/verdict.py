"""What may be said of solutions: whose sample each is, how often it occurs, and whether that is proved."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.certificate import Assessment
from dosimeter.engines.subspace.equations import Equations, probabilities, whole_span
from dosimeter.engines.subspace.spectrum import ROUNDING_SLACK

LARGEST_ERROR_BAR = 1e-2  # the largest error bar of a certified sample
SHARE_TOLERANCE = 0.1  # how far a sample's share of the gradient may be from a whole number of samples, whatever its error bar
MOST_COPIES = 8  # of one input under two classes that may pass for one blended sample, where nobody says the batch size


@dataclass(frozen=True, kw_only=True)
class Separation:
    """The samples found, guesses among them; one entry a distinct sample."""

    features: Tensor  # (n, H)
    labels: Tensor  # (n,)
    residual: Tensor  # (n,) ‖(I − UUᵀ) w∘d‖ / ‖w∘d‖
    error_bar: Tensor  # (n,) on the relative feature error
    isolated: Tensor  # (n,) bool
    certified: Tensor  # (n,) bool
    times: Tensor  # (n,) how often the sample occurs
    rank: int
    soft: Tensor | None = None  # (n, C) the target that the loss aims at, where that is not one class

    @property
    def complete(self) -> bool:
        """As many certified, distinct samples as the gradient has dimensions: nothing is left over."""
        return self.rank > 0 and int(self.certified.sum()) == self.rank


@dataclass(frozen=True, kw_only=True)
class BatchFacts:
    """What is known of the batch beside its gradient."""

    batch_size: int | None = None  # where it is declared
    free_scale: bool = False  # the client may have scaled the gradient, as clipping does
    non_negative: bool = False  # the features follow a ReLU


def judge(
    equations: Equations,
    t: Tensor,
    labels: Tensor,
    residual: Tensor,
    bar: Tensor,
    isolated: Tensor,
    mass: Tensor,
    mass_bar: Tensor,
    trusted: Tensor,
    facts: BatchFacts,
) -> Separation:
    """The verdict: each sample's share of the gradient must be a whole number of samples, and no twin may hide in the noise.

    A share that is off a whole number by more than its error bar refutes the sample, however small its residual.
    """
    features = t @ equations.basis
    size = torch.linalg.vector_norm(features, dim=1)
    reference = mass_of_one(equations, mass[trusted], facts)
    times = reference / mass
    unsure = mass_bar / mass
    if facts.free_scale and bool(trusted.any()):
        unsure = unsure + unsure[torch.where(trusted, mass, -torch.inf).argmax()]  # of the sample that the others are held against
    shared = (times.round() >= 1) & ((times - times.round()).abs() <= (times * unsure).clamp_max(SHARE_TOLERANCE))
    could_merge = times.round() > 1
    trusted = trusted & shared & _leave_room(equations, times, trusted & shared, reference, facts)
    if not _size_is_known(equations, reference, int(trusted.sum()), facts):
        could_merge = torch.ones_like(could_merge)
    bar = torch.where(could_merge, torch.hypot(bar, hidden_difference(equations, t) / size), bar)
    certified = trusted & (bar <= LARGEST_ERROR_BAR)
    if facts.non_negative:
        certified &= features.amin(1) >= -bar * size
    return Separation(
        features=features,
        labels=labels,
        residual=residual,
        error_bar=bar,
        isolated=isolated,
        certified=certified,
        times=torch.where(certified, times.round(), 1.0).long(),  # a guess counts once
        rank=equations.rank,
    )


def mass_of_one(equations: Equations, mass: Tensor, facts: BatchFacts) -> float:
    """The mass of a sample that occurs once: the declared batch size, else the largest of the trusted samples, else the rank.

    Samples that occur several times, or that are several alike ones, have smaller masses; and no batch is smaller than the rank.
    """
    if facts.batch_size is not None and not facts.free_scale:
        return facts.batch_size * equations.temperature
    if len(mass) == 0:
        return equations.rank * equations.temperature
    largest = float(mass.max())
    return largest if facts.free_scale else max(round(largest / equations.temperature), equations.rank) * equations.temperature


def _leave_room(equations: Equations, times: Tensor, trusted: Tensor, reference: float, facts: BatchFacts) -> Tensor:
    """Which samples the dimensions that are left over leave room for: (n,) bool.

    Two samples that are merely alike add a dimension each, and pass for one that occurs twice, which adds one. So a sample
    may occur several times only where the others, one for each dimension left, still fit into the batch; where the scale and so the
    batch size is unknown, only where none is left, and then most of the dimensions must be found for any to be one sample.
    """
    left = equations.rank - int(trusted.sum())
    several = times.round() > 1
    if facts.free_scale:
        return torch.full_like(several, int(trusted.sum()) > left) & (~several if left else torch.ones_like(several))
    fits = float(times[trusted].round().sum()) + left <= reference / equations.temperature + 0.5
    return torch.ones_like(several) if fits else ~several


def _size_is_known(equations: Equations, reference: float, found: int, facts: BatchFacts) -> bool:
    """Whether a sample that takes one share is one sample: the size is declared, or the shares say that it is the rank.

    In the second case all of them would have to be several alike samples, and as many each, for one of them to be. Where the
    scale is unknown, both must be so: as many equal shares as samples are declared.
    """
    if facts.free_scale:
        return facts.batch_size == equations.rank == found
    adds_up = found >= max(3, equations.rank / 2) and abs(reference / equations.temperature - equations.rank) < 0.5
    return facts.batch_size is not None or adds_up


def hidden_difference(equations: Equations, t: Tensor) -> Tensor:
    """How far apart two samples of one label may be and still pass for one sample that occurs twice: (n,).

    With features f ± δ the gradient holds their mean twice, and (M δ)(δᵀ)/B besides, M = w∘∂p/∂f; below the smallest signal
    that the spectrum keeps, ‖M δ‖ ‖δ‖ ≤ B · threshold, that part is lost in the noise.
    """
    spectrum = equations.spectrum
    p = probabilities(equations, whole_span(equations), t)
    lever = (spectrum.weights * p).square() @ equations.weight.square().mean(1)  # ‖M δ‖² / ‖δ‖² for a δ of random direction
    return (equations.rank * ROUNDING_SLACK * spectrum.edge / lever.sqrt().clamp_min(1e-30)).sqrt()


def label_blends(equations: Equations, result: Separation, labels: Tensor, single: Assessment, facts: BatchFacts) -> Separation:
    """Pairs of classes as soft labels; a share that its bar does not tell from none or all is none or all.

    Even shares go by the lower class. A blended sample that occurs several times is not certified: copies of one input with
    different labels look the same. Nor is one whose share is a small fraction where nobody says the batch size: every input of the
    batch may then occur as often, and this one under two classes.
    """
    share = torch.where(single.second_share <= single.second_bar, 0.0, single.second_share)
    share = torch.where(share >= 1 - single.second_bar, 1.0, share)
    first, second = labels // equations.classes, labels % equations.classes
    soft = (1 - share)[:, None] * one_hot(first, equations.classes) + share[:, None] * one_hot(second, equations.classes)
    even = (share - 0.5).abs() <= single.second_bar
    label = torch.where(even, torch.minimum(first, second), torch.where(share > 0.5, second, first))
    one_target = (share == 0) | (share == 1) | ((result.times == 1) & ~_may_be_copies(equations, share, single.second_bar, facts))
    return replace(result, labels=label, soft=equations.share * soft + equations.even, certified=result.certified & one_target)


def _may_be_copies(equations: Equations, share: Tensor, bar: Tensor, facts: BatchFacts) -> Tensor:
    """Whether a share is that of some of a few copies, and the batch size does not speak against them: (n,) bool."""
    if facts.batch_size is not None and (not facts.free_scale or facts.batch_size == equations.rank):
        return torch.zeros_like(share, dtype=torch.bool)
    copies = torch.arange(2, MOST_COPIES + 1, dtype=share.dtype, device=share.device)
    counts = share[:, None] * copies  # (n, m) of the second class
    return ((counts - counts.round()).abs() <= bar[:, None] * copies).any(1)


def empty_separation(equations: Equations) -> Separation:
    empty = equations.basis.new_empty(0)
    labels, no = empty.long(), empty.bool()
    features = empty.view(0, equations.weight.shape[1])
    return Separation(
        features=features, labels=labels, residual=empty, error_bar=empty, isolated=no, certified=no, times=labels, rank=equations.rank
    )
