"""The server's side: each method runs on an exposure alone, after its needs are checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dosimeter.client.checks import check_exposure, check_soft_labels
from dosimeter.engines.needs import check_needs
from dosimeter.interfaces import Attack, Exposure, FeatureRecovery, LabelRecovery, Public
from dosimeter.randomness import generator, global_seed
from dosimeter.registry import ATTACKS, FEATURES, LABELS
from dosimeter.runs.vain_proofs import without_vain_proof
from dosimeter.types import FeatureEstimate, LabelEstimate, MapEstimate, Reconstruction

Labels = LabelEstimate | Tensor | None


def recover_labels(exposure: Exposure, method: str | LabelRecovery, *, seed: int = 0, **options: Any) -> LabelEstimate:
    """Recover the batch's labels with a label recovery, by name and options or as an object."""
    recovery = LABELS.resolve(method, **options)
    check_exposure(exposure)
    return run_label_recovery(exposure, recovery, seed)


def recover_features(
    exposure: Exposure, method: str | FeatureRecovery, *, labels: Labels = None, seed: int = 0, **options: Any
) -> FeatureEstimate:
    """Recover the inputs of the last linear layer. `labels` is an estimate, a tensor, or None where the method needs none.

    A tensor holds class ids (B,) or soft labels (B, C). A class id of -1 is an unknown label, which some methods allow.
    """
    recovery = FEATURES.resolve(method, **options)
    check_exposure(exposure)
    return run_feature_recovery(exposure, recovery, labels, seed)


def reconstruct(exposure: Exposure, method: str | Attack, *, labels: Labels = None, seed: int = 0, **options: Any) -> Reconstruction:
    """Recover the inputs. `labels` is an estimate, a tensor, or None where the attack finds the labels itself."""
    attack = ATTACKS.resolve(method, **options)
    check_exposure(exposure)
    return run_attack(exposure, attack, labels, seed)


def recover_maps(exposure: Exposure, layer: str | None = None, *, seed: int = 0) -> MapEstimate:
    """Recover the activation maps of the whole batch at a convolution's input; without `layer`, the first one that shows them all."""
    from dosimeter.engines.shifts.recover import recover_maps as read_maps

    check_exposure(exposure)
    return without_vain_proof(read_maps(exposure, layer, seed=seed), exposure.public)


def run_label_recovery(exposure: Exposure, recovery: LabelRecovery, seed: int) -> LabelEstimate:
    """`recover_labels` on an exposure that is checked already."""
    check_needs(recovery, exposure, None)
    role = f"labels {recovery.name}"
    with global_seed(seed, role):
        return without_vain_proof(recovery(exposure, _rng(exposure, seed, role)), exposure.public)


def run_feature_recovery(exposure: Exposure, recovery: FeatureRecovery, labels: Labels, seed: int) -> FeatureEstimate:
    known = as_label_estimate(labels, exposure.public)
    check_needs(recovery, exposure, known)
    role = f"features {recovery.name}"
    with global_seed(seed, role):
        return without_vain_proof(recovery(exposure, known, _rng(exposure, seed, role)), exposure.public)


def run_attack(exposure: Exposure, attack: Attack, labels: Labels, seed: int) -> Reconstruction:
    known = as_label_estimate(labels, exposure.public)
    check_needs(attack, exposure, known)
    role = f"attack {attack.name}"
    with global_seed(seed, role):
        return without_vain_proof(attack(exposure, known, _rng(exposure, seed, role)), exposure.public)


def as_label_estimate(labels: Labels, public: Public) -> LabelEstimate | None:
    """Labels as an estimate: from class ids (B,), -1 for unknown, or soft labels (B, C). An estimate or None stays as it is."""
    if labels is None:
        return None
    if isinstance(labels, LabelEstimate):
        _check_estimate(labels, public.classes)
        return labels
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a LabelEstimate, a tensor or None, got {type(labels).__name__}")
    classes = public.classes
    soft = labels if labels.ndim == 2 else None
    ids = labels.argmax(1) if labels.ndim == 2 else labels
    if ids.ndim != 1 or (soft is not None and soft.shape[1] != classes) or ids.is_floating_point():
        raise ValueError(
            f"labels: expected (B,) class ids or (B, {classes}) soft labels, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if soft is not None:
        check_soft_labels(soft.double(), "labels", public.loss)
    if len(ids) == 0 or int(ids.min()) < -1 or int(ids.max()) >= max(classes, 2):
        raise ValueError(f"labels: expected at least one class id in 0..{classes - 1}, or -1 for an unknown one")
    return LabelEstimate(counts=torch.bincount(ids[ids >= 0], minlength=classes), labels=ids, soft=soft)


def _check_estimate(labels: LabelEstimate, classes: int) -> None:
    """Refuse an estimate for a model with another number of classes."""
    counted, widest = tuple(labels.counts.shape), max(classes, 2)
    if counted not in ((classes,), (widest,)) or (labels.soft is not None and labels.soft.shape[1:] not in ((classes,), (widest,))):
        raise ValueError(f"labels: expected an estimate over {classes} classes, got one with counts of shape {counted}")
    if labels.labels.ndim != 1 or labels.labels.is_floating_point() or (len(labels.labels) and int(labels.labels.max()) >= widest):
        raise ValueError(f"labels: expected class ids (B,) below {widest}, got {labels.labels.dtype} of shape {tuple(labels.labels.shape)}")


def _rng(exposure: Exposure, seed: int, role: str) -> torch.Generator:
    return generator(seed, role, next(iter(exposure.update.values())).device)
