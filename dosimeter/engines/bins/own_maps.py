"""An inserted layer of which every client fills its own columns: each gets other convolutions in front of the same rows."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor, nn

from dosimeter.engines.bins.inserted_layer import LAYER_STRENGTH, InsertedLayer
from dosimeter.network.per_client import SentPerClient
from dosimeter.options import mismatch


class OwnMaps(SentPerClient):
    """Copies the input to the columns of one client, where `rows` sort it into bins, and passes input and mean answer on to the body.

    `maps` holds C kernels for each client. The client's own kernels copy the C channels, times `scale`, and all others are zero. `marks`
    is one for the client and zero for the others. So a client's gradient at `rows` fills its own columns alone: Σ δ_i · scale · x_i and,
    in its mark's column, Σ δ_i.
    """

    def __init__(self, layer: InsertedLayer, shape: tuple[int, int, int], clients: int, scale: float) -> None:
        super().__init__()
        channels = shape[0]
        bins, entries = layer.rows.weight.shape
        like = layer.rows.weight.detach()
        self.shape, self.clients, self.scale, self.client = shape, clients, scale, 0
        self.maps = nn.Conv2d(channels, clients * channels, 3, padding=1, bias=False, device=like.device, dtype=like.dtype)
        try:
            self.rows = nn.Linear(clients * (entries + 1), bins, device=like.device, dtype=like.dtype)
        except (RuntimeError, MemoryError) as error:
            raise mismatch("attack.bins", f"as many as fit into memory for {clients} clients", bins) from error
        self.marks = nn.Parameter(like.new_zeros(clients))
        self.body, self.bins = layer.body, layer.bins
        with torch.no_grad():
            self.rows.weight.zero_()[:, : clients * entries] = (like / scale).repeat(1, clients)
            self.rows.bias.copy_(layer.rows.bias)
        self._copy_to(0)

    def forward(self, inputs: Tensor) -> Tensor:
        if inputs.shape[1:] != self.shape:
            raise ValueError(f"input_shape: the layer was inserted for inputs of shape {self.shape}, got {tuple(inputs.shape[1:])}")
        seen = torch.cat([self.maps(inputs).flatten(1), self.marks.expand(len(inputs), -1)], 1)  # (B, clients · (d + 1))
        answers = self.rows(seen).clamp(0, 1)  # (B, k)
        return self.body(inputs + LAYER_STRENGTH * answers.mean(1).reshape(-1, 1, 1, 1))

    def of_client(self, number: int) -> nn.Module:
        if number >= self.clients:
            raise mismatch("attack.clients", f"at least the {number + 1} clients that train", self.clients)
        other = copy.copy(self)
        other._modules, other._parameters = dict(self._modules), dict(self._parameters)
        other.maps, other.marks = copy.deepcopy(self.maps), copy.deepcopy(self.marks)
        other._copy_to(number)
        return other

    def columns_of(self, change: Tensor, number: int) -> tuple[Tensor, Tensor]:
        """The client's part of a value of `rows.weight` (k, ...): of its copied input (k, d), and of its mark (k,)."""
        entries = math.prod(self.shape)
        return change[:, number * entries : (number + 1) * entries], change[:, self.clients * entries + number]

    def layer_of(self, number: int) -> InsertedLayer:
        """The inserted layer that this client's gradient is one of."""
        weight = self.columns_of(self.rows.weight.detach(), number)[0]
        rows = nn.Linear(weight.shape[1], len(weight), device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            rows.weight.copy_(self.scale * weight)
            rows.bias.copy_(self.rows.bias)
        return InsertedLayer(rows, self.body, self.bins, sparse=True).train(self.training)

    def _copy_to(self, number: int) -> None:
        """Fill the kernels and the mark of one client, and empty all others."""
        channels = self.shape[0]
        with torch.no_grad():
            self.maps.weight.zero_()
            for channel in range(channels):
                self.maps.weight[number * channels + channel, channel, 1, 1] = self.scale
            self.marks.zero_()[number] = 1.0
        self.client = number
