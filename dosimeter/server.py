"""The server's side: what each method needs is checked, then it runs on an exposure and on nothing else."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client import check_exposure
from dosimeter.head import find_head
from dosimeter.interfaces import Attack, FeatureRecovery, LabelRecovery, Method
from dosimeter.randomness import generator, seeded
from dosimeter.registry import ATTACKS, FEATURES, LABELS
from dosimeter.types import Exposure, FeatureEstimate, Knowledge, LabelEstimate, Reconstruction, Refused

Labels = LabelEstimate | Tensor | None


def recover_labels(exposure: Exposure, method: str | LabelRecovery, *, seed: int = 0, **options: Any) -> LabelEstimate:
    """Recover the batch's labels with a label recovery, by name and options or as an object."""
    recovery = LABELS.resolve(method, **options)
    check_exposure(exposure)
    check_needs(recovery, exposure, None)
    role = f"labels {recovery.name}"
    with seeded(seed, role):
        return recovery(exposure, _rng(exposure, seed, role))


def recover_features(
    exposure: Exposure, method: str | FeatureRecovery, *, labels: Labels = None, seed: int = 0, **options: Any
) -> FeatureEstimate:
    """Recover the inputs of the last linear layer; `labels` may be an estimate, a tensor, or None where the method can do without.

    A tensor holds class ids (B,), -1 for a label that is not known where the method can do with some, or soft labels (B, C).
    """
    recovery = FEATURES.resolve(method, **options)
    check_exposure(exposure)
    known = as_label_estimate(labels, exposure.public.classes)
    check_needs(recovery, exposure, known)
    role = f"features {recovery.name}"
    with seeded(seed, role):
        return recovery(exposure, known, _rng(exposure, seed, role))


def reconstruct(exposure: Exposure, method: str | Attack, *, labels: Labels = None, seed: int = 0, **options: Any) -> Reconstruction:
    """Recover the inputs; `labels` may be an estimate, a tensor, or None where the attack finds its own."""
    attack = ATTACKS.resolve(method, **options)
    check_exposure(exposure)
    known = as_label_estimate(labels, exposure.public.classes)
    check_needs(attack, exposure, known)
    role = f"attack {attack.name}"
    with seeded(seed, role):
        return attack(exposure, known, _rng(exposure, seed, role))


def as_label_estimate(labels: Labels, classes: int) -> LabelEstimate | None:
    """Class ids (B,), -1 where one is not known, or soft labels (B, C) as an estimate; an estimate or None as it is."""
    if labels is None or isinstance(labels, LabelEstimate):
        return labels
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a LabelEstimate, a tensor or None, got {type(labels).__name__}")
    soft = labels if labels.ndim == 2 else None
    ids = labels.argmax(1) if labels.ndim == 2 else labels
    if ids.ndim != 1 or (soft is not None and soft.shape[1] != classes) or ids.is_floating_point():
        raise ValueError(
            f"labels: expected (B,) class ids or (B, {classes}) soft labels, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if soft is not None and not bool((torch.isfinite(soft) & (soft >= 0)).all()):
        raise ValueError("labels: soft labels must be finite and not negative")
    if len(ids) == 0 or int(ids.min()) < -1 or int(ids.max()) >= max(classes, 2):
        raise ValueError(f"labels: expected at least one class id in 0..{classes - 1}, or -1 for an unknown one")
    return LabelEstimate(counts=torch.bincount(ids[ids >= 0], minlength=classes), labels=ids, soft=soft)


def check_needs(method: Method, exposure: Exposure, labels: LabelEstimate | None) -> None:
    """Refuse, with the reason and the remedy, a method that needs what this threat model does not grant."""
    if labels is not None and not method.partial_labels and bool((labels.labels < 0).any()):
        raise Refused(f"{method.name} needs every label or none, and -1 marks an unknown one; the feature recovery subspace takes some")
    for need in sorted(method.needs):
        missing = _missing(need, exposure, labels)
        if missing:
            raise Refused(f"{method.name} needs {'the ' if need in _DEFINITE else ''}{need.value}: {missing}")


_DEFINITE = {Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.ALL_GRADIENTS, Knowledge.BATCH_SIZE}


def _missing(need: Knowledge, exposure: Exposure, labels: LabelEstimate | None) -> str:
    """Why `need` is not granted here, or nothing where it is."""
    public = exposure.public
    match need:
        case Knowledge.HEAD_GRADIENT:
            head = find_head(exposure)
            if not head.alone:
                return "the last layer shares its weight with another, and only the sum of their gradients is sent"
            if head.weight_gradient is None:
                return "the client withholds the last layer"
        case Knowledge.BIAS_GRADIENT:
            head = find_head(exposure)
            if head.bias is None:
                return "the last layer has no bias; a bias-free method such as subspace would do"
            if head.bias_gradient is None:
                return "the client withholds it"
        case Knowledge.ALL_GRADIENTS:
            withheld = [n for n, p in exposure.model.named_parameters() if p.requires_grad and n not in exposure.update]
            if withheld:
                return f"the client withholds {len(withheld)} layers, {withheld[0]!r} among them"
        case Knowledge.BATCH_SIZE:
            if public.batch_size is None:
                return "the client does not declare it"
        case Knowledge.LABELS:
            if labels is None:
                return "pass labels=dm.recover_labels(exposure, ...) or a tensor"
        case Knowledge.AUXILIARY:
            if exposure.auxiliary is None:
                return "observe(..., auxiliary=dm.Batch(...)) grants it"
        case Knowledge.NON_NEGATIVE_FEATURES:
            if not find_head(exposure).non_negative:
                return "the inputs of the last layer can be negative, as no ReLU stands before it"
        case Knowledge.SINGLE_SAMPLE:
            if public.batch_size != 1:
                return f"this batch has {public.batch_size or 'an unknown number of'} samples"
        case Knowledge.SOFTMAX_LOSS:
            if not public.loss.shift_invariant:
                return f"the client trains with {public.loss.name}"
        case Knowledge.BATCH_NORM:
            if not any(isinstance(m, nn.modules.batchnorm._BatchNorm) for m in exposure.model.modules()):
                return "the model has none"
        case Knowledge.TAMPERED_MODEL:
            return ""  # the attack itself checks that the model bears its mark
    return ""


def _rng(exposure: Exposure, seed: int, role: str) -> torch.Generator:
    return generator(seed, role, next(iter(exposure.update.values())).device)
