"""Which of several scales of one sample's feature is taken: its input must reproduce the feature, then lie in the range of the data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dosimeter.client.losses import as_distribution
from dosimeter.engines.recursion.feature_scale import ScaledFeature
from dosimeter.engines.recursion.row_quotients import RANGE_SLACK
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head
from dosimeter.network.probing import input_of
from dosimeter.normalization import input_bounds
from dosimeter.types import LabelEstimate

CONSISTENT_FEATURE = 1e-2  # relative distance between a feature and the one that the network computes from the recovered input


def choose_scale(exposure: Exposure, head: Head, inputs: Tensor, scaled: Sequence[ScaledFeature]) -> tuple[int, int]:
    """The first of the inputs (n, *shape), one a scale, that passes the checks; and the number of others that pass too."""
    features = torch.stack([one.feature for one in scaled])  # (n, H)
    given = input_of(exposure.model, head.name, inputs.to(head.weight)).double()
    consistent = (given - features).norm(dim=1) <= CONSISTENT_FEATURE * features.norm(dim=1)
    low, high = input_bounds(exposure.public.normalization, inputs)
    slack = RANGE_SLACK * (high - low)
    inside = ((inputs >= low - slack) & (inputs <= high + slack)).flatten(1).all(1)
    left = torch.ones_like(consistent)
    for passed in (consistent, inside):
        left = left & passed if bool((left & passed).any()) else left
    return int(left.nonzero()[0]), int(left.sum()) - 1


def given_label(labels: LabelEstimate, classes: int) -> Tensor:
    """The label of a batch of one as a distribution (C,)."""
    rows = labels.labels if labels.soft is None else labels.soft
    return as_distribution(rows, classes, torch.float64)[0]
