"""Clients whose last layer is known: a linear layer behind a ReLU, so that inputs are its features."""

import pytest
import torch
from torch import nn

from dosimeter.runs.measurement import AuditedClient
from dosimeter.types import Batch


@pytest.fixture
def client_with():
    """A client with these features (B, H), labels and head weight (C, H), whose bias is zero unless given."""

    def build(features, labels, weight, bias=None, auxiliary=None):
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.copy_(torch.zeros(len(weight)) if bias is None else bias)
        granted = None if auxiliary is None else Batch(auxiliary, torch.zeros(len(auxiliary), dtype=torch.long))
        return AuditedClient(model=nn.Sequential(nn.ReLU(), layer).eval(), batch=Batch(features, labels), auxiliary=granted)

    return build


@pytest.fixture
def rng():
    return torch.Generator().manual_seed(0)
