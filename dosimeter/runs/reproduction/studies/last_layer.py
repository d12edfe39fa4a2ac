"""What goes through the last layer of a client's model, which most studies are about."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.losses import as_distribution
from dosimeter.network.head import locate_head
from dosimeter.network.probing import input_of
from dosimeter.runs.measurement import AuditedClient


@dataclass(frozen=True, kw_only=True)
class LastLayer:
    """z = W f + b on a private batch, in double precision, with the gradients of plain cross-entropy."""

    weight: Tensor  # (C, H)
    bias: Tensor  # (C,)
    features: Tensor  # (B, H)
    labels: Tensor  # (B,), or (B, C) for soft labels

    @property
    def logits(self) -> Tensor:
        return self.features @ self.weight.T + self.bias  # (B, C)

    @property
    def probabilities(self) -> Tensor:
        return torch.softmax(self.logits, 1)  # (B, C)

    @property
    def errors(self) -> Tensor:
        """p − y, each sample's gradient at its logits and at the bias: (B, C)."""
        return self.probabilities - as_distribution(self.labels, len(self.weight), self.weight.dtype)


def last_layer(client: AuditedClient) -> LastLayer:
    """The last layer of the client's model, which sees the private batch in its own mode."""
    return last_layer_on(client, client.batch.inputs, client.batch.targets)


def last_layer_on(client: AuditedClient, inputs: Tensor, labels: Tensor) -> LastLayer:
    name, _ = locate_head(client.model, tuple(inputs.shape[1:]))
    layer = client.model.get_submodule(name)
    weight = layer.get_parameter("weight").detach().double()
    bias = layer.bias
    return LastLayer(
        weight=weight,
        bias=bias.detach().double() if isinstance(bias, Tensor) else torch.zeros_like(weight[:, 0]),
        features=input_of(client.model, name, inputs).double(),
        labels=labels,
    )
