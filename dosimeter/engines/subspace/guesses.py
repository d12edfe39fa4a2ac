"""Guesses for the samples that a distorted gradient cannot prove: the most likely features behind the defenses in force."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import sends_mean_gradient
from dosimeter.engines.subspace.certificate import DEVIATIONS
from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.engines.subspace.feature_prior import FeaturePrior, find_feature_prior
from dosimeter.engines.subspace.likelihood import LikelihoodProblem, LikelyFeatures, find_likely_features, is_small_enough
from dosimeter.engines.subspace.problem import may_be_scaled, scaled_by_layer
from dosimeter.engines.subspace.separate import Separation
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head
from dosimeter.types import LabelEstimate

SIGNIFICANT_DEVIATIONS = 5.0  # standard deviations by which a present class's row exceeds the noise
PRESENT_CLASS_STRENGTH = 0.2  # of the strongest row: a class counts as present above this, if no batch size is declared


def add_likely_guesses(
    found: Separation, exposure: Exposure, head: Head, labels: LabelEstimate | None
) -> tuple[Separation, LikelyFeatures | None]:
    """The separation with its uncertified samples replaced by the most likely ones, if a public defense distorts the gradient.

    Certified samples stay. Labels that are not given are read off the rows: the row of a sample's label points against its feature.
    """
    problem = None if found.complete else _likelihood_problem(exposure, head, labels)
    if problem is None:
        return found, None
    likely = find_likely_features(problem)
    new = _find_uncertified(found, likely.features, problem.labels)  # indices of guesses
    kept = found.certified
    count = len(new)
    guess = likely.features.new_full((count,), likely.residual)
    merged = replace(
        found,
        features=torch.cat([found.features[kept], likely.features[new]]),
        labels=torch.cat([found.labels[kept], problem.labels[new]]),
        residual=torch.cat([found.residual[kept], guess]),
        error_bar=torch.cat([found.error_bar[kept], DEVIATIONS * likely.spread[new]]),
        isolated=torch.cat([found.isolated[kept], torch.zeros_like(guess, dtype=torch.bool)]),
        certified=torch.cat([found.certified[kept], torch.zeros_like(guess, dtype=torch.bool)]),
        times=torch.cat([found.times[kept], torch.ones_like(problem.labels[new])]),
        rank=max(found.rank, problem.size),
        soft=None if found.soft is None else torch.cat([found.soft[kept], problem.targets[new].to(found.soft)]),
    )
    return merged, likely


def _likelihood_problem(exposure: Exposure, head: Head, labels: LabelEstimate | None) -> LikelihoodProblem | None:
    """The head as a likelihood problem; None if no defense distorts it, the loss or training differs, or it is too large."""
    public, loss = exposure.public, exposure.public.loss
    gradient = None if head.weight_gradient is None else head.weight_gradient.detach().to(torch.float64)
    distortion = distortion_of(gradient, public)
    if gradient is None or distortion is None or not isinstance(loss, CrossEntropy) or not sends_mean_gradient(public):
        return None
    if not bool(gradient.any()) or not bool(torch.isfinite(gradient).all()):
        return None
    bias_gradient = None if head.bias_gradient is None or scaled_by_layer(public) else head.bias_gradient.detach().to(torch.float64)
    bias_distortion = distortion_of(bias_gradient, public)
    prior = find_feature_prior(exposure, head)
    one_sign = prior is None and _has_one_sign(gradient)
    prior = prior or _flat_prior(gradient, public.batch_size, one_sign)
    non_negative = head.non_negative or one_sign
    against, noise = -(gradient @ prior.mean), distortion.noise * float(torch.linalg.vector_norm(prior.mean))
    if (
        not non_negative and bias_gradient is not None and bias_distortion is not None
    ):  # rows of features of both signs do not show the label
        against, noise = -bias_gradient, bias_distortion.noise
    ids, soft = _assume_labels(against, noise, public.batch_size, labels)
    if not is_small_enough(len(ids), gradient.shape[1]):
        return None
    return LikelihoodProblem(
        weight=head.weight.to(torch.float64) / loss.temperature,
        bias=(torch.zeros_like(gradient[:, 0]) if head.bias is None else head.bias.to(torch.float64)) / loss.temperature,
        targets=loss.smooth_targets(ids if soft is None else soft, head.classes, torch.float64),
        labels=ids,
        temperature=loss.temperature,
        gradient=gradient,
        distortion=distortion,
        bias_gradient=bias_gradient,
        bias_distortion=bias_distortion,
        prior=prior,
        non_negative=non_negative,
        free_scale=may_be_scaled(public),
    )


def _has_one_sign(gradient: Tensor) -> bool:
    """Whether the largest entries are all negative. They stand in the rows of the labels, so the features are then non-negative."""
    largest = gradient.flatten()[gradient.abs().flatten().topk(max(1, gradient.numel() // 1000)).indices]
    return bool((largest < 0).all())


def _flat_prior(gradient: Tensor, size: int | None, one_sign: bool) -> FeaturePrior:
    """The prior if nothing is known of the features: all of one Gaussian about zero before any ReLU, the largest at three deviations."""
    largest = gradient.abs().flatten().topk(max(1, gradient.numel() // 1000)).values.median() * (size or 1)
    each = (largest / 3).expand(gradient.shape[1])
    return FeaturePrior(mean=each * one_sign, size=each, gain=torch.zeros_like(largest), spread=torch.ones_like(largest))


def _assume_labels(against: Tensor, noise: float, size: int | None, given: LabelEstimate | None) -> tuple[Tensor, Tensor | None]:
    """The samples' classes (B,), and their soft labels (B, C) where these are given.

    `against` (C,) says how far each class's row points against the mean feature. If no labels are given, every class beyond the noise
    is present once, and the rest of the batch is shared out by the rows' sizes, largest remainder first.
    """
    if given is not None and bool((given.labels >= 0).all()) and (size is None or len(given.labels) == size):
        return given.labels.to(against.device), given.soft
    present, against = against > SIGNIFICANT_DEVIATIONS * noise, against.clamp_min(0)
    if size is None:
        return (present & (against > PRESENT_CLASS_STRENGTH * against.max())).nonzero()[:, 0], None
    share = size * against / against.sum().clamp_min(torch.finfo(against.dtype).tiny)
    units = share[:, None] - torch.arange(size, device=share.device)  # (C, B) the claim of each further sample of a class
    units[:, 0] += size * present
    return (units.flatten().topk(size).indices // size).sort().values, None


def _find_uncertified(found: Separation, features: Tensor, labels: Tensor) -> Tensor:
    """Indices (m,) of the most likely samples that are not matched to a certified one."""
    left = torch.ones_like(labels, dtype=torch.bool)
    for sample, label, times in zip(found.features[found.certified], found.labels[found.certified], found.times[found.certified]):
        distance = torch.linalg.vector_norm(features - sample, dim=1)
        near = torch.where(left & (labels == label), distance, torch.inf).argsort()[: int(times)]
        left[near] &= ~torch.isfinite(torch.where(left & (labels == label), distance, torch.inf)[near])
    return left.nonzero()[:, 0]
