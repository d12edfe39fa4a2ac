"""Samples with any number of labels, out of the head's gradient under binary cross-entropy.

∇W = (1/N) Σ dᵢ fᵢᵀ with dᵢ = σ(W fᵢ + b) − yᵢ, where N is the batch size, times the classes where the loss is a mean over them. With
∇W = U S Vᵀ of rank r, every feature is f = Vᵀ x and every error d = U c. So each sample on its own has C equations in 2r unknowns,

    σ(W Vᵀ x + b) − y = U c,   y ∈ {0, 1}^C,                                                                                     (1)

and its share of the gradient is one sample's: 1/N = 1/(cᵀ S⁻¹ x). No list of label vectors is searched: an error lies in (−1, 1) and has
the sign of its label, so that rounding σ − U c gives y, and Gauss–Newton steps in x alternate with it. A certified sample is taken off
the gradient, whose rank drops by one.

Without biases, σ(−z) = 1 − σ(z): the mirror image (−f, 1 − y) of a sample has the error −d, the same share and the same gradient. Where the
image solves (1) too, the gradient of the bias, ∇b = (1/N) Σ dᵢ, tells the two apart, or features that are never negative.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.subspace.spectrum import noise_edge
from dosimeter.engines.subspace.verdict import least_lever
from dosimeter.engines.tokens.span import span_of

STARTS = 1024  # at once
ROUNDS = 12  # of starts without a new sample, before the search ends
STEPS = 40
POLISHING = 8  # steps in the whole gradient
SEPARATIONS = 10  # fixed-point steps that lead a start towards errors of one size
DEVIATIONS = 8.0  # of an error bar
LARGEST_BAR = 1e-2  # relative error of a certified feature
SHARE_SLACK = 0.02  # by which a sample's share may miss a whole number of samples, at most
SHARE_BARS = 4.0  # by which it may, in error bars
SPARE_BITS = 40.0  # by which the equations must outweigh the number of label vectors
SAME = 1e-3  # relative distance of two features that are one
SIGN_SLACK = 0.1  # by which a sample's part in the bias's gradient may miss its share
NEGATIVE_SLACK = 1e-2  # relative size of what may be negative in a feature that is not


@dataclass(frozen=True, kw_only=True)
class LabelledSamples:
    """What was found. Every entry is certified: its equations hold to the noise, and nothing else explains them but its mirror image."""

    features: Tensor  # (n, H)
    vectors: Tensor  # (n, C) of zeros and ones
    error_bar: Tensor  # (n,) relative, of each feature
    residual: Tensor  # (n,) part of the error outside of the gradient's column space, relative
    times: Tensor  # (n,) int64, how often the sample occurs
    oriented: Tensor  # (n,) bool: it is not its mirror image
    rank: int  # of the gradient
    samples: int | None  # in the batch: declared, or by the smallest share; None where neither tells

    @property
    def complete(self) -> bool:
        return self.rank > 0 and len(self.features) == self.rank


@dataclass(frozen=True, kw_only=True)
class Head64:
    """The head's equations in double precision."""

    gradient: Tensor  # (C, H)
    weight: Tensor  # (C, H)
    bias: Tensor  # (C,)
    unit: float  # relative rounding of the gradient's entries
    noise: float  # declared noise of an entry
    scale: float  # N over the batch size: the classes, or 1
    model_unit: float = torch.finfo(torch.float32).eps  # relative rounding of the outputs that the client computed
    bias_gradient: Tensor | None = None  # (C,)
    bias_noise: float = 0.0  # declared noise of an entry of it
    non_negative: bool = False  # no feature has a negative entry


def find_label_vectors(head: Head64, batch_size: int | None, rng: Generator) -> LabelledSamples:
    """Every sample that the head's gradient certifies, one after the other."""
    found: list[_Sample] = []
    gradient, rank = head.gradient, span_of(head.gradient, head.unit, declared=head.noise).rank
    quiet, size, whole = 0, batch_size, _Equations.of(head, gradient, rank)
    while quiet < ROUNDS and len(found) < rank and whole.determined:
        more = _new_samples(whole, _Equations.of(head, gradient, rank - len(found)), found, size, rng)
        quiet = 0 if more else quiet + 1
        found += more
        size = size if size is not None or not found else round(1 / (head.scale * min(one.share for one in found)))
        gradient = _without(head.gradient, found)
    found = _leaving_room(head, found, rank, size)
    return _gather(head, *_oriented(whole, found, rank, size), rank, size)


def _without(gradient: Tensor, found: list[_Sample]) -> Tensor:
    """The head's gradient without what the samples add to it."""
    return gradient - sum((one.share * torch.outer(one.error, one.feature) for one in found), torch.zeros_like(gradient))


@dataclass(frozen=True, kw_only=True)
class _Sample:
    feature: Tensor  # (H,)
    vector: Tensor  # (C,)
    error: Tensor  # (C,)
    share: float  # of the gradient: times / N
    bar: float
    residual: float


@dataclass(frozen=True, kw_only=True)
class _Equations:
    """Equation (1) in the coordinates of the gradient's row and column spaces."""

    head: Head64
    left: Tensor  # (C, r) U
    values: Tensor  # (r,) S
    right: Tensor  # (r, H) Vᵀ
    lever: Tensor  # (C, r) W Vᵀ
    noise: float  # of an entry of the gradient

    @classmethod
    def of(cls, head: Head64, gradient: Tensor, rank: int) -> _Equations:
        left, values, right = torch.linalg.svd(gradient, full_matrices=False)
        rows, columns = gradient.shape
        tail = float(values[rank:].square().sum().div(max((rows - rank) * (columns - rank), 1)).sqrt())
        rounding = head.unit * float(head.gradient.square().mean().sqrt())
        left, values, right = left[:, :rank], values[:rank], right[:rank]
        noise = max(tail, rounding, head.noise)
        return cls(head=head, left=left, values=values, right=right, lever=head.weight @ right.T, noise=noise)

    @property
    def rank(self) -> int:
        return len(self.values)

    @property
    def determined(self) -> bool:
        """Whether there are more equations than unknowns, and the smallest direction stands above the noise."""
        classes, features = self.head.weight.shape
        return classes > 2 * self.rank and float(self.values[-1]) > 2 * noise_edge(self.noise, classes, features)

    def residual(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """σ − y outside of the column space (n, C), σ, and c: (n, r)."""
        probability = torch.sigmoid(x @ self.lever.T + self.head.bias)
        error = probability - y
        inside = error @ self.left
        return error - inside @ self.left.T, probability, inside

    def jacobian(self, probability: Tensor) -> Tensor:
        slopes = (probability * (1 - probability))[:, :, None] * self.lever  # (n, C, r)
        return slopes - self.left @ (self.left.T @ slopes)


def _new_samples(whole: _Equations, left: _Equations, known: list[_Sample], size: int | None, rng: Generator) -> list[_Sample]:
    """Certified samples that are not known yet: from one round of starts in what is left of the gradient, polished in the whole of it."""
    x, y = _descend(left, *_start(left, rng), STEPS)
    residual, probability, _ = left.residual(x, y)
    relative = residual.norm(dim=1) / (probability - y).norm(dim=1).clamp_min(torch.finfo(x.dtype).tiny)
    best = relative.argsort()[: 8 * left.rank]
    x, y = _descend(whole, x[best] @ left.right @ whole.right.T, y[best], POLISHING)
    found: list[_Sample] = []
    for one, vector in zip(x, y):
        sample = _certify(whole, one, vector, size)
        if sample is not None and all(_differ(sample.feature, other.feature) for other in (*known, *found)):
            found.append(sample)
    return found


def _start(equations: _Equations, rng: Generator) -> tuple[Tensor, Tensor]:
    """Errors in the column space, of which half are led to where their entries have one size (kurtosis: Hyvärinen 1999)."""
    like = equations.values
    inside = torch.randn(STARTS, equations.rank, generator=rng, device=rng.device, dtype=torch.float64).to(like)
    errors = inside @ equations.left.T
    separated = errors[: STARTS // 2]
    for _ in range(SEPARATIONS):
        separated = separated / separated.square().mean(1, keepdim=True).sqrt()
        inside = (separated**3 - 3 * separated) @ equations.left
        separated = inside @ equations.left.T
    errors = torch.cat([separated, errors[STARTS // 2 :]])
    largest = 0.3 + 0.65 * torch.rand(STARTS, 1, generator=rng, device=rng.device, dtype=torch.float64).to(like)
    errors = largest * errors / errors.abs().amax(1, keepdim=True).clamp_min(torch.finfo(like.dtype).tiny)
    y = (errors < 0).to(like)
    wanted = torch.logit((errors + y).clamp(0.05, 0.95)) - equations.head.bias
    return wanted @ torch.linalg.pinv(equations.lever).T, y


def _descend(equations: _Equations, x: Tensor, y: Tensor, steps: int) -> tuple[Tensor, Tensor]:
    """Levenberg–Marquardt steps in x; before each, y is rounded anew."""
    damping = torch.full_like(x[:, 0], 1e-3)
    identity = torch.eye(equations.rank, dtype=x.dtype, device=x.device)
    _, probability, inside = equations.residual(x, y)
    for _ in range(steps):
        y = ((probability - inside @ equations.left.T) > 0.5).to(x)
        residual, probability, inside = equations.residual(x, y)
        jacobian = equations.jacobian(probability)
        square = jacobian.transpose(1, 2) @ jacobian
        size = damping * square.diagonal(dim1=1, dim2=2).mean(1).clamp_min(1e-30)
        step = torch.linalg.solve(square + size[:, None, None] * identity, (jacobian.transpose(1, 2) @ residual[:, :, None]))[:, :, 0]
        after, probability_after, inside_after = equations.residual(x - step, y)
        better = after.square().sum(1) < residual.square().sum(1)
        x = torch.where(better[:, None], x - step, x)
        probability = torch.where(better[:, None], probability_after, probability)
        inside = torch.where(better[:, None], inside_after, inside)
        damping = torch.where(better, damping / 5, damping * 5).clamp(1e-9, 1e6)
    return x, y


def _certify(equations: _Equations, x: Tensor, y: Tensor, size: int | None) -> _Sample | None:
    """The sample, where noise explains its residual, its error bar is small, and its share is that of a whole number of samples.

    A vector of the column space is d = G V S⁻¹ c, so noise of size σ leaves σ ‖S⁻¹ c‖ √(C − r) of it outside; likewise for the
    row space. Samples that count as one may differ by what noise hides (`_hidden_difference`). C − 2r equations that hold to a relative
    precision ρ have less than 2^C ρ^(C − 2r) accidental solutions; the share is one more equation where the batch size is declared.
    """
    residual, probability, inside = (part[0] for part in equations.residual(x[None], y[None]))
    error, rank = probability - y, equations.rank
    classes, features = equations.head.weight.shape
    of_gradient = equations.noise * float((inside / equations.values).norm()) * math.sqrt(classes - rank)
    outside = DEVIATIONS * (of_gradient + equations.head.model_unit * math.sqrt(classes) / 4)  # a sigmoid's slope is 1/4 at most
    length, feature_length = float(error.norm()), float(x.norm())
    if not float(residual.norm()) <= outside or not 0 < length < math.inf or not feature_length > 0:
        return None
    bits = -(classes - 2 * rank) * math.log2(min(outside / length, 1.0)) - classes
    smallest = float(torch.linalg.svdvals(equations.jacobian(probability[None])[0])[-1])
    beside = DEVIATIONS * equations.noise * float((x / equations.values).norm()) * math.sqrt(features - rank)
    bar = math.hypot(outside / max(smallest, 1e-300), beside) / feature_length
    share = 1 / float((inside / equations.values) @ x)
    whole = 1
    if size is not None:
        times, slack = share * size * equations.head.scale, min(SHARE_BARS * (bar + outside / length), SHARE_SLACK)
        whole = round(times)
        if whole < 1 or abs(times - whole) > slack * whole:
            return None
        bits -= math.log2(slack)  # one more equation
        share = whole / (size * equations.head.scale)
    if (size is None or whole > 1) and share > 0:
        bar = math.hypot(bar, _hidden_difference(equations, probability, share) / feature_length)
    if bits < SPARE_BITS or bar > LARGEST_BAR or share <= 0:
        return None
    relative = float(residual.norm()) / length
    return _Sample(feature=x @ equations.right, vector=y, error=error, share=share, bar=bar, residual=relative)


def _hidden_difference(equations: _Equations, probability: Tensor, share: float) -> float:
    """The largest distance at which samples with the same labels, of this share together, still look like one that occurs several times.

    Features f ± δ give the gradient of their mean, plus `share` · (M δ) δᵀ with M = σ′ W, which noise hides below its edge.
    """
    head = equations.head
    classes, features = head.weight.shape
    each = (probability * (1 - probability)).square() * head.weight.square().mean(1)  # (C,)
    lever = float(least_lever(each[None]))
    edge = DEVIATIONS * noise_edge(equations.noise, classes, features)
    return math.sqrt(edge / (share * math.sqrt(max(lever, 1e-300))))


def _differ(one: Tensor, other: Tensor) -> bool:
    """Whether two features are neither one nor mirror images."""
    return min(float((one - other).norm()), float((one + other).norm())) > SAME * float(other.norm())


def _oriented(whole: _Equations, found: list[_Sample], rank: int, size: int | None) -> tuple[list[_Sample], list[bool]]:
    """The samples, those turned round that are seen to be mirror images, and of each whether its mirror image is ruled out."""
    right, head = whole.right, whole.head
    open_ones = [_certify(whole, -(one.feature @ right.T), 1 - one.vector, size) is not None for one in found]
    if not any(open_ones):
        return found, [True] * len(found)
    signs = _signs_by_bias(head, found, rank)
    if signs is None and head.non_negative:
        signs = [_sign_of_feature(one.feature) for one in found]
    signs = [0] * len(found) if signs is None else signs
    turned = [_mirrored(one) if sign < 0 and unsure else one for one, sign, unsure in zip(found, signs, open_ones)]
    return turned, [bool(sign) or not unsure for sign, unsure in zip(signs, open_ones)]


def _mirrored(one: _Sample) -> _Sample:
    return replace(one, feature=-one.feature, vector=1 - one.vector, error=-one.error)


def _signs_by_bias(head: Head64, found: list[_Sample], rank: int) -> list[int] | None:
    """1 where the bias's gradient holds a sample's error, −1 where it holds that of the mirror image; None where it tells nothing.

    The errors of samples that were not found lie in the column space of what is left of the gradient.
    """
    if head.bias_gradient is None:
        return None
    errors = torch.stack([one.share * one.error for one in found], 1)  # (C, n)
    others = torch.linalg.svd(_without(head.gradient, found), full_matrices=False)[0][:, : rank - len(found)]
    columns = torch.cat([errors, others * errors.norm(dim=0).mean()], 1)
    inverse = torch.linalg.pinv(columns)
    parts = (inverse @ head.bias_gradient)[: len(found)]
    noise = max(head.bias_noise, head.unit * float(head.bias_gradient.norm()))
    shaken = DEVIATIONS * noise * inverse[: len(found)].norm(dim=1)
    factor = float(parts.abs().median())  # one of all samples, where a defense scaled the layer
    if factor <= 0 or not bool(((parts.abs() / factor - 1).abs() + shaken / factor <= SIGN_SLACK).all()):
        return None
    return [1 if part > 0 else -1 for part in parts.tolist()]


def _sign_of_feature(feature: Tensor) -> int:
    """1 where the feature is never negative, −1 where it is never positive, else 0."""
    limit = NEGATIVE_SLACK * float(feature.norm())
    if float(feature.clamp_max(0).norm()) <= limit:
        return 1
    return -1 if float(feature.clamp_min(0).norm()) <= limit else 0


def _leaving_room(head: Head64, found: list[_Sample], rank: int, size: int | None) -> list[_Sample]:
    """The samples, without those that count as several where the batch has no room for them and one sample in each direction left over.

    Two alike samples span two directions, and look like one that occurs twice.
    """
    times = [round(one.share * head.scale * (size or 0)) for one in found]
    fits = size is None or sum(times) + rank - len(found) <= size
    return [one for one, count in zip(found, times) if fits or count <= 1]


def _gather(head: Head64, found: list[_Sample], oriented: list[bool], rank: int, size: int | None) -> LabelledSamples:
    like = head.gradient
    shares = torch.tensor([one.share for one in found], dtype=torch.float64)
    times = (shares * head.scale * (size or 0)).round().clamp_min(1).long()
    return LabelledSamples(
        features=torch.stack([one.feature for one in found]) if found else like[:0],
        vectors=torch.stack([one.vector for one in found]) if found else like.new_zeros(0, len(like)),
        error_bar=torch.tensor([one.bar for one in found], dtype=torch.float64),
        residual=torch.tensor([one.residual for one in found], dtype=torch.float64),
        times=times,
        oriented=torch.tensor(oriented, dtype=torch.bool),
        rank=rank,
        samples=size,
    )
