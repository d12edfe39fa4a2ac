"""What papers print about the inside of a label recovery: the errors of quantities on the way to the labels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import cosine_similarity

from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import as_taken, output_of
from dosimeter.types import Batch, LabelEstimate


def inner_errors(found: LabelEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
    """iLRG's class-wise probabilities and the soft-label scalar, where a method gives them and the model is in eval mode."""
    if exposure.model.training:
        return {}
    errors: dict[str, Any] = {}
    if {"probabilities", "classes"} <= found.details.keys():
        errors["probability_cosine"] = _probability_cosine(found, exposure, truth)
    if "published_unit" in found.details:
        errors["scalar_error"] = _scalar_error(found, exposure, truth)
    return errors


def _scalar_error(found: LabelEstimate, exposure: Exposure, truth: Batch) -> float:
    """|λ − λ*| of soft-labels Table 5, L_s: λ* is the unit over p_r − y_r of the private sample."""
    logits = output_of(exposure.model, as_taken(exposure.model, truth.inputs))  # (1, C)
    probabilities = (logits.double() / getattr(exposure.public.loss, "temperature", 1.0)).softmax(1)
    error = (probabilities - as_distribution(truth.targets, logits.shape[1], torch.float64).to(logits.device))[0, int(found.details["row"])]
    unit = float(found.details["published_unit"])
    return abs(unit * float(found.details["scalar"]) - unit / float(error))


def _probability_cosine(found: LabelEstimate, exposure: Exposure, truth: Batch) -> float | None:
    """CosSim of iLRG's Table 1: how near each present class's recovered probabilities are to the mean over its samples."""
    classes, estimated = found.details["classes"].cpu(), found.details["probabilities"].double().cpu()  # (n,), (n, n)
    own = (truth.targets if truth.targets.ndim == 1 else truth.targets.argmax(1)).cpu()  # (B,)
    true = output_of(exposure.model, as_taken(exposure.model, truth.inputs)).double().cpu().softmax(1)[:, classes]  # (B, n)
    present = [place for place, label in enumerate(classes.tolist()) if bool((own == label).any())]
    if not present or estimated.shape[1] != true.shape[1]:
        return None
    means = torch.stack([true[own == classes[place]].mean(0) for place in present])
    return float(cosine_similarity(estimated[present], means, 1).mean())
