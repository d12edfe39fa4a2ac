"""The verdict on solutions: how often each sample occurs, and whether it is proved."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.certificate import Assessment
from dosimeter.engines.subspace.equations import Equations, probabilities, whole_span
from dosimeter.engines.subspace.search import Candidates
from dosimeter.engines.subspace.spectrum import ROUNDING_SLACK

LARGEST_ERROR_BAR = 1e-2  # the largest error bar of a certified sample
SHARE_TOLERANCE = 0.1  # the largest distance of a sample's share from a whole number of samples, whatever its error bar
UNLIKELY_DIRECTIONS = 1e-3  # share of the directions along which two similar samples may differ by more than is allowed for
MOST_COPIES = 8  # copies of one input under two classes that may pass for one blend, if no batch size is declared


@dataclass(frozen=True, kw_only=True)
class Solutions:
    """What a search found, polished and assessed one by one. A longer search of the same equations goes on from here."""

    found: Candidates
    t: Tensor  # (n, B) polished
    single: Assessment
    trusted: Tensor  # (n,) bool: a sample by its own equations

    def joined(self, other: Solutions) -> Solutions:
        """These solutions, and the others behind them."""
        return Solutions(
            found=_join(self.found, other.found),
            t=torch.cat([self.t, other.t]),
            single=_join(self.single, other.single),
            trusted=torch.cat([self.trusted, other.trusted]),
        )


OneASample = TypeVar("OneASample", Candidates, Assessment)


def _join(first: OneASample, second: OneASample) -> OneASample:
    pairs = {field.name: [getattr(first, field.name), getattr(second, field.name)] for field in fields(first)}
    return type(first)(**{name: torch.cat(pair) for name, pair in pairs.items()})


@dataclass(frozen=True, kw_only=True)
class Separation:
    """The samples found, certified ones and guesses; one entry a distinct sample."""

    features: Tensor  # (n, H)
    labels: Tensor  # (n,)
    residual: Tensor  # (n,) ‖(I − UUᵀ) w∘d‖ / ‖w∘d‖
    error_bar: Tensor  # (n,) on the relative feature error
    isolated: Tensor  # (n,) bool
    certified: Tensor  # (n,) bool
    times: Tensor  # (n,) how often the sample occurs
    rank: int
    soft: Tensor | None = None  # (n, C) the target that the loss aims at, where that is not one class
    batch_size: int | None = None  # as declared, or the least that the shares allow; None where neither is known
    solutions: Solutions | None = None  # from which it was judged, where these are single samples
    doubt: str = ""  # why nothing is certified whatever fits, "" where nothing speaks against it

    @property
    def complete(self) -> bool:
        """Whether as many distinct samples are certified as the gradient has dimensions, so that nothing is left over."""
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
    """The samples at `t` (n, B), certified or not.

    A certified sample's share of the gradient is a whole number of samples, and no similar sample can hide in the noise beside it. A share
    that misses a whole number by more than its error bar refutes the sample, however small the residual is.
    """
    features = t @ equations.basis
    size = torch.linalg.vector_norm(features, dim=1)
    reference = mass_of_one(equations, mass[trusted], facts)
    times = reference / mass
    unsure = mass_bar / mass
    if facts.free_scale and bool(trusted.any()):
        unsure = unsure + unsure[torch.where(trusted, mass, -torch.inf).argmax()]  # of the sample that sets the reference
    shared = (times.round() >= 1) & ((times - times.round()).abs() <= (times * unsure).clamp_max(SHARE_TOLERANCE))
    could_merge = times.round() > 1
    trusted = trusted & shared & _leave_room(equations, times, trusted & shared, reference, facts)
    if not _size_is_known(equations, reference, int(trusted.sum()), facts):
        could_merge = torch.ones_like(could_merge)
    bar = torch.where(could_merge, torch.hypot(bar, hidden_difference(equations, t, reference / equations.temperature) / size), bar)
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
        batch_size=_least_batch_size(equations, reference, facts),
    )


def _least_batch_size(equations: Equations, reference: float, facts: BatchFacts) -> int | None:
    """The declared batch size, else the mass of a sample that occurs once; None if the gradient's scale is unknown too."""
    if facts.batch_size is not None or facts.free_scale:
        return facts.batch_size
    return round(reference / equations.temperature)


def mass_of_one(equations: Equations, mass: Tensor, facts: BatchFacts) -> float:
    """The mass of a sample that occurs once: the declared batch size, else the largest mass of a trusted sample, else the rank.

    A sample that occurs several times has a smaller mass, and so has a group of similar samples. No batch is smaller than the rank.
    """
    if facts.batch_size is not None and not facts.free_scale:
        return facts.batch_size * equations.temperature
    if len(mass) == 0:
        return equations.rank * equations.temperature
    largest = float(mass.max())
    return largest if facts.free_scale else max(round(largest / equations.temperature), equations.rank) * equations.temperature


def _leave_room(equations: Equations, times: Tensor, trusted: Tensor, reference: float, facts: BatchFacts) -> Tensor:
    """Which samples leave room in the batch for one sample in each dimension that is still unexplained: (n,) bool.

    Two similar samples span two dimensions but look like one sample that occurs twice. A sample is therefore taken to occur several times
    only if the batch still has room for one sample in each unexplained dimension. If the scale is unknown, so is the batch size: then no
    dimension may be left, and most dimensions must be explained for any sample to count.
    """
    left = equations.rank - int(trusted.sum())
    several = times.round() > 1
    if facts.free_scale:
        return torch.full_like(several, int(trusted.sum()) > left) & (~several if left else torch.ones_like(several))
    fits = float(times[trusted].round().sum()) + left <= reference / equations.temperature + 0.5
    return torch.ones_like(several) if fits else ~several


def _size_is_known(equations: Equations, reference: float, found: int, facts: BatchFacts) -> bool:
    """Whether one share of the gradient is one sample: the batch size is declared, or the shares show that it is the rank.

    In the second case one share could hide several similar samples only if every share hid as many. The premise that the batch is the
    smallest with this gradient excludes it. If the scale is unknown, both must hold: the rank is the declared size, and all shares are
    found.
    """
    if facts.free_scale:
        return facts.batch_size == equations.rank == found
    adds_up = found >= max(3, equations.rank / 2) and abs(reference / equations.temperature - equations.rank) < 0.5
    return facts.batch_size is not None or adds_up


def hidden_difference(equations: Equations, t: Tensor, size: float) -> Tensor:
    """The largest distance at which two samples of one label still look like one sample that occurs twice: (n,).

    Features f ± δ give the gradient of their mean twice, plus (M δ)(δᵀ)/B with M = w∘∂p/∂f and B the batch's `size`. That part is lost in
    the noise if it is below the smallest signal of the spectrum, ‖M δ‖ ‖δ‖ ≤ B · threshold. No difference shows along which all logits
    are equal.
    """
    spectrum = equations.spectrum
    p = probabilities(equations, whole_span(equations), t)
    each = (spectrum.weights * p).square() * equations.weight.square().mean(1)  # (n, C)
    lever = least_lever(each)
    return (size * ROUNDING_SLACK * spectrum.edge / lever.sqrt().clamp_min(1e-30)).sqrt()


def least_lever(each: Tensor) -> Tensor:
    """The ‖M δ‖²/‖δ‖² (n,) that hardly any direction of δ falls short of, for matrices whose rows have these mean squares (n, C).

    For a random direction it is a sum of as many squared Gaussians as M has directions of weight; all but `UNLIKELY_DIRECTIONS` exceed
    the quantile that is used.
    """
    mean = each.sum(1)
    directions = mean.square() / each.square().sum(1).clamp_min(torch.finfo(mean.dtype).tiny)  # (n,) that have weight
    half = directions.clamp_min(1) / 2
    lowest = torch.exp((torch.lgamma(half + 1) + math.log(UNLIKELY_DIRECTIONS)) / half) / half  # P(χ²ₖ < x) ≤ (x/2)^(k/2) / Γ(k/2 + 1)
    return mean * lowest.clamp_max(1)


def label_blends(equations: Equations, result: Separation, labels: Tensor, single: Assessment, facts: BatchFacts) -> Separation:
    """The separation with pairs of classes as soft labels. A share within its bar of 0 or 1 becomes 0 or 1.

    Of two equal shares, the lower class is the label. A blended sample that occurs several times is not certified, because copies of one
    input under different labels look the same. Without a declared batch size, a blend whose share is a simple fraction is not certified
    either: every input of the batch may occur that often, and this one under two classes.
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
    """Whether a share is the fraction of a few copies, and no batch size rules copies out: (n,) bool."""
    if facts.batch_size is not None and (not facts.free_scale or facts.batch_size == equations.rank):
        return torch.zeros_like(share, dtype=torch.bool)
    copies = torch.arange(2, MOST_COPIES + 1, dtype=share.dtype, device=share.device)
    counts = share[:, None] * copies  # (n, m) of the second class
    return ((counts - counts.round()).abs() <= bar[:, None] * copies).any(1)


def empty_separation(equations: Equations) -> Separation:
    """No sample at all."""
    empty = equations.basis.new_empty(0)
    labels, no = empty.long(), empty.bool()
    features = empty.view(0, equations.weight.shape[1])
    return Separation(
        features=features, labels=labels, residual=empty, error_bar=empty, isolated=no, certified=no, times=labels, rank=equations.rank
    )
