"""LOKI: every client fills columns of its own in one inserted layer, so that an aggregate shows whose sample is whose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, nn

from dosimeter.attacks.imprint import read_inserted_layer
from dosimeter.client.training import MeanOfClients
from dosimeter.engines.bins.contents import Blur
from dosimeter.engines.bins.inserted_layer import Moments, insert_layer, measure_moments
from dosimeter.engines.bins.own_maps import OwnMaps
from dosimeter.engines.needs import why_not_sent
from dosimeter.engines.row_errors import quotients_keep_their_scale, row_errors
from dosimeter.engines.sample_share import takes_local_steps
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.network.input_shape import find_input_shape
from dosimeter.options import NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Normalization, Outcome, Reconstruction, Refused

ROWS = "rows.weight"


@ATTACKS.register("loki")
@dataclass(frozen=True, kw_only=True)
class Loki(ActiveAttack):
    """Gives every client convolutions that copy its pictures to columns of its own, in front of one layer of bins.

    Zhao et al., "LOKI: Large-scale Data Reconstruction Attack against Federated Learning through Model Manipulation", IEEE S&P 2024 (thesis
    Section 5.2), with the settings of a demonstration of it: a 3×3 identity kernel for each channel and client, all other clients' kernels
    zero; rows of mean brightness, two-sided (answers within [0, 1]), four a sample; the kernels times a scaling factor, the rows divided by
    it. Behind secure aggregation, the columns of a client hold its own samples alone. The scaling makes each local step move a row so far
    that it fires no second time: of the samples of several mini-batches that share a row, the first is left.
    Departures: one further column a client, its mark, holds the sum of its samples' weights, so that a row gives the sample itself in place
    of a multiple that is stretched to [0, 1]. What is claimed must be confirmed, as by `imprint`. There is no ReLU behind the kernels, so
    that normalised inputs pass. The scaling factor is a power of two, so that it rounds nothing.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL})

    clients: PositiveInt = 1  # for which there are columns
    bins: PositiveInt = 256  # rows, which all clients share
    scale: PositiveFloat = 2.0**15  # 500 in the demonstration
    input_shape: tuple[PositiveInt, ...] | None = None  # none: the common shape that passes through the model
    normalization: Normalization | None = None  # how pixels in [0, 1] become inputs; none: they are the inputs
    moments: Moments | None = None  # of brightness over the clients' kind of data, as `after` measures them
    round: NonNegativeInt = 0

    def tamper(self, model: nn.Module) -> OwnMaps:
        if isinstance(model, OwnMaps):
            raise Refused("the model has loki's layer already: tamper with the one from before")
        shape = self.input_shape or find_input_shape(model)
        if len(shape) != 3:
            raise Refused(f"loki copies pictures by convolutions: it needs inputs (channels, height, width), and these are {shape}")
        channels, height, width = shape
        layer = insert_layer(
            model,
            shape,
            ("brightness",),
            self.bins,
            sparse=True,
            normalization=self.normalization,
            moments=self.moments,
            round_number=self.round,
        )
        return OwnMaps(layer, (channels, height, width), self.clients, self.scale).train(model.training)

    def after(self, found: Reconstruction) -> Loki:
        """The attack of the next round: other bins, fitted to the data that this round recovered."""
        moments = measure_moments(found.inputs, found.normalization) if len(found.inputs) > 1 else self.moments
        return replace(self, moments=moments, round=self.round + 1)

    def of_clients(self, exposure: Exposure) -> tuple[Reconstruction, ...]:
        """The samples of every client, in the order of the clients."""
        model, sizes = exposure.model, _sizes(exposure)
        if not isinstance(model, OwnMaps):
            raise Refused("loki needs a model that bears its layer: send dm.attack('loki', clients=...).tamper(model) and observe that")
        if ROWS not in exposure.update:
            raise Refused(f"loki reads the gradient of the inserted layer: {why_not_sent(exposure, ROWS, repr(ROWS))}")
        if len(sizes) > model.clients:
            raise Refused(f"loki's layer has columns for {model.clients} clients, and {len(sizes)} train")
        return tuple(_of_client(exposure, model, number, size) for number, size in enumerate(sizes))

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        each = self.of_clients(exposure)
        filled = [one for one in each if len(one.inputs)]
        note = "; ".join(f"client {number}: {one.message}" for number, one in enumerate(each))
        if not filled:
            return replace(each[0], message=note)
        whole = all(one.outcome is Outcome.COMPLETED for one in each)
        return Reconstruction(
            inputs=torch.cat([one.inputs for one in filled]),
            labels=torch.cat([one.labels for one in filled]),
            objective=max(one.objective for one in filled),
            normalization=exposure.public.normalization,
            outcome=Outcome.COMPLETED if whole else Outcome.PARTIAL,
            message=note,
            premises=tuple(dict.fromkeys(premise for one in filled for premise in one.premises)),
        )


def _sizes(exposure: Exposure) -> list[int | None]:
    """How many samples each client has, as far as it is declared."""
    training, size = exposure.public.training, exposure.public.batch_size
    if not isinstance(training, MeanOfClients):
        return [size]
    if training.sizes:
        if size not in (None, sum(training.sizes)):
            raise Refused(f"loki needs clients' sizes that sum to the declared batch size {size}; they sum to {sum(training.sizes)}")
        return list(training.sizes)
    return [None] * training.clients if size is None else [len(one) for one in torch.arange(size).tensor_split(training.clients)]


def _of_client(exposure: Exposure, model: OwnMaps, number: int, size: int | None) -> Reconstruction:
    """What the columns of one client show, as an update of `imprint`'s layer that this client sent alone."""
    public, layer = exposure.public, model.layer_of(number)
    whole = public.batch_size
    factor = 1.0 if whole is None or size is None else whole / size  # the mean over all clients' samples, as one over the client's own
    copies, marks = model.columns_of(factor * exposure.update[ROWS], number)
    if isinstance(public.training, MeanOfClients):
        defenses = tuple(one for one in public.defenses if one.name != "secure_aggregation")
        public = replace(public, batch_size=size, training=public.training.each, defenses=defenses)
    alone = replace(exposure, model=layer, update={"rows.weight": copies / model.scale, "rows.bias": marks}, public=public)
    return read_inserted_layer(alone, layer, None, size, _blur(exposure, model, number, factor))


def _blur(exposure: Exposure, model: OwnMaps, number: int, factor: float) -> Blur:
    """What the clients' rounding and their defenses may have changed in the columns of one client."""
    public = exposure.public
    parts = zip(model.columns_of(exposure.update[ROWS], number), model.columns_of(model.rows.weight.detach(), number), strict=True)
    copies, marks = (row_errors(change, weight, public) for change, weight in parts)
    norms = factor * torch.hypot(copies.norms / model.scale, marks.norms)  # (k,)
    entries = factor * (copies.entries / model.scale + marks.entries)
    unsure = takes_local_steps(public.training) or not quotients_keep_their_scale(public, exposure.update, (ROWS,))
    return Blur(norms=torch.full_like(norms, torch.inf) if unsure else norms, entries=entries)
