"""Whether what a feature recovery certified is true."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.metrics.feature_error import FeatureError
from dosimeter.types import FeatureEstimate

LARGEST_ERROR = 1e-2  # a certificate promises at least this, or its own error bar where that is tighter


def false_certificates(found: FeatureEstimate, features: Tensor, targets: Tensor, assignment: Tensor) -> Tensor:
    """Which recovered samples are certified and yet refuted by the truth: (n,) bool.

    A certificate is false where its sample has no partner among the true `features` (B, H), a feature error above 1e-2 or
    above its own error bar (plus what the model's floating point rounds away), or a label that is not the truth's largest.
    """
    device = features.device
    matched = assignment >= 0
    partners = assignment[matched]
    error = torch.full((len(found.features),), torch.inf, dtype=torch.float64, device=device)
    error[partners] = FeatureError()(found.features.detach().to(device)[partners], features[matched])
    limit = torch.full_like(error, LARGEST_ERROR)
    if found.error_bar is not None:
        limit = torch.minimum(limit, found.error_bar.to(limit) + 8 * torch.finfo(features.dtype).eps)
    right = torch.zeros(len(found.features), dtype=torch.bool, device=device)
    right[partners] = _agree(found.labels.to(device)[partners], targets.to(device)[matched])
    return found.certified.to(device) & ~((error <= limit) & right)


def _agree(labels: Tensor, targets: Tensor) -> Tensor:
    """Whether each label is its target, or one of the largest entries of a soft one: (k,) bool."""
    if targets.ndim == 1:
        return labels == targets
    known = labels.clamp(0, targets.shape[1] - 1)
    return (known == labels) & (targets.gather(1, known[:, None])[:, 0] == targets.max(1).values)
