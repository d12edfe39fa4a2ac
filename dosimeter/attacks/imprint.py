"""Robbing the Fed: an inserted layer that files every sample into a bin of its own."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.client.training import FedAvg
from dosimeter.engines.bins.black_and_white import black_and_white_bins
from dosimeter.engines.bins.contents import Blur, DecodedBins, decode_bins
from dosimeter.engines.bins.inserted_layer import LAYER_NAMES, Functional, InsertedLayer, Moments, insert_layer, measure_moments
from dosimeter.engines.bins.replay import replayer_for
from dosimeter.engines.cancelling_labels import sums_may_pass
from dosimeter.engines.needs import why_not_sent
from dosimeter.engines.premises import premises_of
from dosimeter.engines.recursion.black_and_white import PREMISE as BLACK_AND_WHITE
from dosimeter.engines.row_errors import quotients_keep_their_scale, row_errors
from dosimeter.engines.sample_share import takes_local_steps, training_of_one_client
from dosimeter.engines.subspace.distortion import unmodelled
from dosimeter.engines.whole_batch import WholeBatch
from dosimeter.interfaces import ActiveAttack, Exposure, Public
from dosimeter.network.input_shape import find_input_shape
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Normalization, Outcome, Reconstruction, Refused


@ATTACKS.register("imprint")
@dataclass(frozen=True, kw_only=True)
class Imprint(ActiveAttack):
    """Inserts a linear layer whose rows sort samples into bins, and reads each sample that lies alone off the gradient.

    Fowl et al., "Robbing the Fed: Directly Obtaining Private Data in Federated Learning with Modified Models", ICLR 2022: the rows
    compare one linear functional with its quantiles, and differences of adjacent rows' gradients give the samples (Eq. 6). `sparse` is
    their variant.
    Departures: several functionals share the rows (published: `functionals=("brightness",)`). Linear dependences separate shared bins.
    8-bit levels, or the model's derivative and the bins of other functionals, must confirm a sample. Quantiles are normal, with natural
    images' moments. The layer adds its mean answer to the input. Each `round` has other bins.
    Secure aggregation mixes all clients' samples. After local steps only levels confirm one, or all samples confirm each other.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL})

    bins: PositiveInt = 1000
    functionals: tuple[Functional, ...] = ("brightness", "cosine", "random")
    sparse: bool = False
    input_shape: tuple[PositiveInt, ...] | None = None  # none: the common shape that passes through the model
    normalization: Normalization | None = None  # how pixels in [0, 1] become inputs; none: they are the inputs
    moments: Moments | None = None  # of the functionals over the client's kind of data, as `after` measures them
    round: NonNegativeInt = 0

    def tamper(self, model: nn.Module) -> InsertedLayer:
        shape = self.input_shape or find_input_shape(model)
        return insert_layer(
            model,
            shape,
            self.functionals,
            self.bins,
            sparse=self.sparse,
            normalization=self.normalization,
            moments=self.moments,
            round_number=self.round,
        )

    def after(self, found: Reconstruction) -> Imprint:
        """The attack of the next round: other bins, fitted to the data that this round recovered."""
        moments = measure_moments(found.inputs, found.normalization) if len(found.inputs) > 1 else self.moments
        return replace(self, moments=moments, round=self.round + 1)

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        layer = exposure.model
        if not isinstance(layer, InsertedLayer):
            raise Refused("imprint needs a model that bears its layer: send dm.attack('imprint').tamper(model) and observe that")
        known = None if labels is None else labels.counts.nonzero().flatten()
        return read_inserted_layer(exposure, layer, known, exposure.public.batch_size)


def read_inserted_layer(
    exposure: Exposure, layer: InsertedLayer, labels: torch.Tensor | None, count: int | None, blur: Blur | None = None
) -> Reconstruction:
    """The samples that the layer's gradient shows alone in a bin.

    `labels` (n,) are those that occur, and `count` is the number of samples, if these are known. `blur` is what the client's rounding and
    its defenses may have changed, where the layer was sent in another form.
    """
    missing = [name for name in LAYER_NAMES if name not in exposure.update]
    if missing:
        raise Refused(f"imprint reads the gradient of the inserted layer: {why_not_sent(exposure, missing[0], repr(missing[0]))}")
    public = exposure.public
    weight, bias = exposure.update["rows.weight"], exposure.update["rows.bias"]
    hidden = unmodelled(weight, public)
    if hidden:
        return exposure.without_inputs(Outcome.SINGULAR, f"{hidden} changes the update in ways that it does not declare: nothing is proved")
    replay = replayer_for(exposure, layer, labels)
    blur = blur or _blur(exposure, layer)

    def decode() -> DecodedBins:
        silent = partial(sums_may_pass, exposure)
        return decode_bins(layer, weight, bias, public.normalization, public.input_shape, replay, blur, count, silent)

    found = decode()
    open_batch = count is not None and count == public.batch_size and len(found.inputs) != count  # `count` may be of some classes alone
    whole = _whole_batch(exposure, found) if open_batch else None
    if open_batch and whole is None and replay is not None and replay.labels_can_cancel():
        replay.trusted = True
        whole = _whole_batch(exposure, decode())
    if whole is not None:
        return _completed(exposure, *whole)
    pictures = black_and_white_bins(exposure, layer, found.inputs)
    inputs = torch.cat([found.inputs, pictures]).reshape(-1, *public.input_shape).to(weight)
    guessed = torch.full((len(inputs),), -1, device=inputs.device)
    if replay is not None and replay.shares and len(found.inputs):
        guessed[: len(found.inputs)] = replay.find_labels(found.inputs, found.weights)
    if count is not None and len(inputs) > count:
        message = f"{len(inputs)} inputs pass for samples, more than the {count} that there are: a premise is wrong, and nothing is claimed"
        return exposure.without_inputs(Outcome.AMBIGUOUS, message)
    missed = 0 if count is None else max(count - len(inputs), 0)
    notes = [f"{len(inputs)} samples found alone"]
    if found.occupied:
        notes.append(f"{found.occupied} bins hold more that cannot be told apart")
    elif missed and len(inputs):
        notes.append(f"the other {missed} left nothing in any bin")
    elif len(inputs):
        notes.append("nothing is left in any bin")
    if takes_local_steps(public.training):
        notes.append("local steps move the layer, so that samples no longer cancel between its rows")
    elif isinstance(training_of_one_client(public.training), FedAvg) and found.occupied:
        notes.append("a change of weights is rounded as the weights are, which hides what samples add to them")
    if len(layer.bins) == 1 and replay is None:
        notes.append("with one functional only the pixels' levels can confirm a sample here")
    outcome = Outcome.PARTIAL if found.occupied or missed else Outcome.COMPLETED
    return Reconstruction(
        inputs=inputs,
        labels=guessed,
        objective=found.residual,
        normalization=public.normalization,
        outcome=outcome if len(inputs) else Outcome.SINGULAR,
        message="; ".join(notes),
        premises=(*_premises(public), *[BLACK_AND_WHITE] * (len(pictures) > 0)) if len(inputs) else (),
    )


def _premises(public: Public) -> tuple[str, ...]:
    return (*premises_of(public), "the client trained the model with the inserted layer, as sent")


def _completed(exposure: Exposure, inputs: Tensor, labels: Tensor) -> Reconstruction:
    """All samples of the batch, which give the whole update together."""
    return Reconstruction(
        inputs=inputs,
        labels=labels,
        objective=0.0,
        normalization=exposure.public.normalization,
        outcome=Outcome.COMPLETED,
        message=f"{len(inputs)} samples found, which give the whole update together",
        premises=_premises(exposure.public),
    )


def _whole_batch(exposure: Exposure, found: DecodedBins) -> tuple[Tensor, Tensor] | None:
    """The samples of the batch and their labels, if the contents of bins give the whole update together."""
    whole = WholeBatch(exposure)
    if not whole.is_possible():
        return None
    inputs = torch.cat([found.inputs, found.others]).reshape(-1, *exposure.public.input_shape).to(exposure.update["rows.weight"])
    given = whole.find(inputs)
    if given is None or not set(range(len(found.inputs))) <= set(given.places.tolist()):
        return None
    return inputs[given.places], given.labels


def _blur(exposure: Exposure, layer: InsertedLayer) -> Blur:
    """What the client's rounding and its defenses may have changed. Nothing but levels is believed where a row's scale is unknown."""
    public = exposure.public
    errors = [row_errors(exposure.update[f"rows.{name}"], layer.rows.get_parameter(name), public) for name in ("weight", "bias")]
    norms, entries = torch.hypot(*(one.norms for one in errors)), errors[0].entries + errors[1].entries  # (k,)
    unsure = takes_local_steps(public.training) or not quotients_keep_their_scale(public, exposure.update, LAYER_NAMES)
    return Blur(norms=torch.full_like(norms, math.inf) if unsure else norms, entries=entries)
