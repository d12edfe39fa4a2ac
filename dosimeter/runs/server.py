"""The server's side: each method runs on an exposure alone, after its needs are checked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dosimeter.client.checks import CLASS_ID_TYPES, check_exposure, check_soft_labels, check_tensor
from dosimeter.engines.needs import check_needs
from dosimeter.interfaces import (
    Attack,
    Exposure,
    FeatureRecovery,
    LabelRecovery,
    MapRecovery,
    Public,
    Recovery,
    TargetRecovery,
    TokenRecovery,
)
from dosimeter.precision import tf32
from dosimeter.randomness import generator, global_seed
from dosimeter.registry import ATTACKS, FEATURES, LABELS, MAPS, TARGETS, TOKENS, Registry
from dosimeter.surfaces.surface import Surface, surface_of_method
from dosimeter.types import Estimate, FeatureEstimate, LabelEstimate, MapEstimate, Reconstruction, TargetEstimate, TokenEstimate

Labels = LabelEstimate | Tensor | None


def _show(found: Estimate) -> str:
    """What a notebook shows of an estimate."""
    from dosimeter.report.notebook import show_estimate

    return show_estimate(found)


Estimate.show = staticmethod(_show)


def recover_labels(exposure: Exposure, method: str | LabelRecovery, *, seed: int = 0, **options: Any) -> LabelEstimate:
    """Recover the batch's labels with a label recovery, by name and options or as an object."""
    return _recover(LABELS, exposure, method, None, seed, options)


def recover_features(
    exposure: Exposure, method: str | FeatureRecovery, *, labels: Labels = None, seed: int = 0, **options: Any
) -> FeatureEstimate:
    """Recover the inputs of the last linear layer. `labels` is an estimate, a tensor, or None where the method needs none.

    A tensor holds class ids (B,) or soft labels (B, C). A class id of -1 is an unknown label, which some methods allow.
    """
    return _recover(FEATURES, exposure, method, labels, seed, options)


def reconstruct(exposure: Exposure, method: str | Attack, *, labels: Labels = None, seed: int = 0, **options: Any) -> Reconstruction:
    """Recover the inputs. `labels` is an estimate, a tensor, or None where the attack finds the labels itself."""
    return _recover(ATTACKS, exposure, method, labels, seed, options)


def recover_maps(
    exposure: Exposure, layer: str | None = None, *, method: str | MapRecovery = "shifts", seed: int = 0, **options: Any
) -> MapEstimate:
    """Recover the activation maps of the whole batch at a convolution's input; without `layer`, the first one that shows them all."""
    named = {"layer": layer, **options} if isinstance(method, str) else options
    return _recover(MAPS, exposure, method, None, seed, named)


def recover_tokens(exposure: Exposure, method: str | TokenRecovery = "embedding_rows", *, seed: int = 0, **options: Any) -> TokenEstimate:
    """Recover the tokens of a batch of texts: which ones occur, and, where the method gives them, in which sequences."""
    return _recover(TOKENS, exposure, method, None, seed, options)


def recover_targets(exposure: Exposure, method: str | TargetRecovery = "head_slopes", *, seed: int = 0, **options: Any) -> TargetEstimate:
    """Recover the numbers that a regression is trained on."""
    return _recover(TARGETS, exposure, method, None, seed, options)


def _recover(registry: Registry[Any], exposure: Exposure, method: Any, labels: Labels, seed: int, options: dict[str, Any]) -> Any:
    recovery = registry.resolve(method, **options)
    check_exposure(exposure)
    return run_method(exposure, recovery, labels, seed)


def run_method(exposure: Exposure, method: Recovery, labels: Labels, seed: int) -> Any:
    """What a method recovers from an exposure that is checked already: the estimate of its surface."""
    surface = surface_of_method(method)
    surface.check_reads(method, exposure.public)
    known = as_label_estimate(labels, exposure.public)
    check_needs(method, exposure, known)
    role = f"{surface.key} {method.name}"
    with global_seed(seed, role), tf32(allowed=False):
        found = surface.recover(method, exposure, known, _rng(exposure, seed, role))
    return without_vain_proof(surface, found, exposure.public)


def without_vain_proof(surface: Surface[Any], found: Any, public: Public) -> Any:
    """The estimate without its proofs where a defense replaces the client's samples: they prove nothing of the private ones."""
    replacing = ", ".join(defense.name for defense in public.defenses if defense.replaces)
    if not replacing or not surface.proves(found):
        return found
    vain = f"what the gradient proves is of the samples after {replacing}, not of the private ones"
    return surface.without_proof(found, "; ".join(filter(None, (found.message, vain))))


def as_label_estimate(labels: Labels, public: Public) -> LabelEstimate | None:
    """Labels as an estimate: from class ids (B,), -1 for unknown, or soft labels (B, C). An estimate or None stays as it is."""
    if labels is None:
        return None
    if isinstance(labels, LabelEstimate):
        _check_estimate(labels, public.classes)
        return labels
    if not isinstance(labels, Tensor):
        raise TypeError(f"labels: expected a LabelEstimate, a tensor or None, got {type(labels).__name__}")
    check_tensor(labels, "labels")
    classes = public.classes
    if public.positions or public.loss.target_kind() == "numbers":
        return _as_targets(labels, public)
    if classes == 1 and labels.ndim == 1 and labels.is_floating_point():
        labels = labels[:, None]
    soft = labels if labels.ndim == 2 else None
    ids = labels.argmax(1) if labels.ndim == 2 else labels
    if ids.ndim != 1 or (soft is not None and soft.shape[1] != classes) or ids.dtype not in CLASS_ID_TYPES:
        raise ValueError(
            f"labels: expected (B,) class ids or (B, {classes}) soft labels, got {labels.dtype} of shape {tuple(labels.shape)}"
        )
    if soft is not None:
        check_soft_labels(soft.double(), "labels", public.loss)
    if len(ids) == 0 or int(ids.min()) < -1 or int(ids.max()) >= max(classes, 2):
        raise ValueError(f"labels: expected at least one class id in 0..{classes - 1}, or -1 for an unknown one")
    ids = ids.long()
    return LabelEstimate(counts=torch.bincount(ids[ids >= 0], minlength=classes), labels=ids, soft=soft)


def _as_targets(labels: Tensor, public: Public) -> LabelEstimate:
    """Known targets that are no labels of whole samples, as numbers or classes at each place."""
    output = (public.classes,) if public.output_shape is None else public.output_shape
    places = output[:-1] if public.blank is not None else output[1:]
    expected = (output, places) if public.loss.target_kind() == "classes" else (public.loss.target_shape(output),)
    if labels.ndim == 0 or tuple(labels.shape[1:]) not in expected:
        raise ValueError(f"labels: expected targets of shape (B, {', '.join(map(str, expected[-1]))}), got {tuple(labels.shape)}")
    blank = torch.zeros(len(labels), dtype=torch.int64, device=labels.device)
    return LabelEstimate(counts=torch.zeros(public.classes, dtype=torch.int64, device=labels.device), labels=blank, soft=labels)


def _check_estimate(labels: LabelEstimate, classes: int) -> None:
    """Refuse an estimate for a model with another number of classes."""
    counted, widest = tuple(labels.counts.shape), max(classes, 2)
    if counted not in ((classes,), (widest,)) or (labels.soft is not None and labels.soft.shape[1:] not in ((classes,), (widest,))):
        raise ValueError(f"labels: expected an estimate over {classes} classes, got one with counts of shape {counted}")
    if labels.labels.ndim != 1 or labels.labels.is_floating_point() or (len(labels.labels) and int(labels.labels.max()) >= widest):
        raise ValueError(f"labels: expected class ids (B,) below {widest}, got {labels.labels.dtype} of shape {tuple(labels.labels.shape)}")


def _rng(exposure: Exposure, seed: int, role: str) -> torch.Generator:
    return generator(seed, role, next(iter(exposure.update.values())).device)
