"""The rounding of an update that is a difference of weights."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from dosimeter.client.training import FedAvg
from dosimeter.engines.sample_share import training_of_one_client
from dosimeter.interfaces import Public


def rounding_of_weights(weight: Tensor, change: Tensor, public: Public) -> Tensor:
    """The standard deviation of the rounding of each entry of `change`, which was sent for `weight`: 0 if it is no difference of weights.

    A step rounds the new weight to a multiple of the weight's last digit. The difference is then divided by learning rate × steps, and the
    rounding with it. It does not shrink with the gradient, so it is large beside the small rows of absent classes.
    """
    training = training_of_one_client(public.training)
    if not isinstance(training, FedAvg):
        return torch.zeros_like(change, dtype=torch.float64)
    unit, before = training.unit(public.batch_size or 1), weight.detach().double()
    larger = torch.maximum(before.abs(), (before - unit * change.double()).abs())  # of the weight before and after
    last_digit = torch.finfo(weight.dtype).eps * torch.exp2(torch.frexp(larger).exponent.double() - 1)
    return torch.where(larger == 0, 0, last_digit) / math.sqrt(12) / unit
