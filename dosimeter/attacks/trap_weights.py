"""Trap weights: a first layer whose neurons each fire for few samples, so that their gradients show single samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, nn

from dosimeter.engines.bins.trap_rows import TrapLayer, find_first_linear, plant_traps
from dosimeter.engines.needs import why_not_sent
from dosimeter.engines.recursion.lone_samples import FirstRows, read_lone_samples
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.network.input_shape import find_input_shape
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction, Refused


@ATTACKS.register("trap_weights")
@dataclass(frozen=True, kw_only=True)
class TrapWeights(ActiveAttack):
    """Gives the first linear layer rows that fire for few samples, and reads those that fired for one alone.

    Boenisch et al., "When the Curious Abandon Honesty: Federated Learning Is Not Private", IEEE EuroS&P 2023: Section 4.1. Half of each
    row's weights are negative, the others have their magnitudes times s < 1. The quotients of weight and bias gradients are inputs.
    Departures: before convolutions the layer is inserted (the paper rewrites them). By default a natural image fires one row in
    `expected`. A quotient is claimed only with a proof that it is one sample (`read_lone_samples`). Each `round` has other rows.
    Secure aggregation mixes all clients' samples. After local steps, rows that fire for one sample alone still work.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL})

    rows: PositiveInt = 1000  # of an inserted layer, at most one an entry of the input; a first linear layer keeps its own number
    scale: Fraction | None = None  # s
    expected: PositiveInt = 32  # samples in a batch
    input_shape: tuple[PositiveInt, ...] | None = None
    round: NonNegativeInt = 0

    def tamper(self, model: nn.Module) -> nn.Module:
        shape = self.input_shape or find_input_shape(model)
        return plant_traps(model, shape, self.rows, self.scale, self.expected, generator(self.round, "trap weights"))

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        name = _trapped_layer(exposure)
        absent = [parameter for parameter in (f"{name}.weight", f"{name}.bias") if parameter not in exposure.update]
        if absent:
            raise Refused(
                f"trap_weights reads the gradient of the layer with its rows: {why_not_sent(exposure, absent[0], repr(absent[0]))}"
            )
        first = FirstRows(weights=[f"{name}.weight"], biases=[f"{name}.bias"])
        return read_lone_samples(exposure, first, labels, tampered="trap rows")


def _trapped_layer(exposure: Exposure) -> str:
    """The name of the layer with trap rows in the received model."""
    model = exposure.model
    name = "rows" if isinstance(model, TrapLayer) else find_first_linear(model, exposure.public.input_shape)
    if name is not None:
        weight = model.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        half = weight.shape[1] // 2
        if bool(((weight < 0).sum(1) == half).all()) and bool(((weight > 0).sum(1) == half).all()):
            return name
    raise Refused("trap_weights needs a model that bears its rows: send dm.attack('trap_weights').tamper(model) and observe that")
