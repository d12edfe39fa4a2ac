"""Proofs about samples that a defense put in the place of the client's own: they prove nothing of the private batch."""

from __future__ import annotations

from dataclasses import replace
from typing import TypeVar

import torch

from dosimeter.interfaces import Public
from dosimeter.types import FeatureEstimate, LabelEstimate, MapEstimate, Reconstruction

Estimate = TypeVar("Estimate", LabelEstimate, FeatureEstimate, MapEstimate, Reconstruction)


def without_vain_proof(found: Estimate, public: Public) -> Estimate:
    """The estimate without its certificates and premises where a defense replaces the client's samples; the message says why."""
    replacing = ", ".join(defense.name for defense in public.defenses if defense.replaces)
    if not replacing or not _proves(found):
        return found
    message = "; ".join(
        filter(None, (found.message, f"what the gradient proves is of the samples after {replacing}, not of the private ones"))
    )
    if isinstance(found, LabelEstimate):
        computed = {name: value for name, value in found.details.items() if name != "proved"}
        return replace(found, certified=False, premises=(), details=computed, message=message)
    if isinstance(found, Reconstruction):
        return replace(found, premises=(), message=message)
    bare = {"premises": ()} if isinstance(found, FeatureEstimate) else {}
    return replace(found, certified=torch.zeros_like(found.certified), message=message, **bare)


def _proves(found: LabelEstimate | FeatureEstimate | MapEstimate | Reconstruction) -> bool:
    """Whether the method claims to have proved any of it."""
    if isinstance(found, Reconstruction):
        return bool(found.premises)
    if isinstance(found, LabelEstimate):
        return found.certified or "proved" in found.details
    return bool(found.certified.any())
