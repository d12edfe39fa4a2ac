"""The maps of a layer whose own gradient does not show them: from another layer's, by the walk down and by forward passes.

Shifts show one layer's maps. The walk solves for those below, and a forward pass carries them to every layer that follows, whatever the
layer's kernel, stride, dilation or padding. What remains are layers that a shortcut feeds too, and those below the walk's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from dosimeter.engines.downward.layers import as_grid
from dosimeter.engines.downward.pictures import Descent, descend
from dosimeter.engines.premises import premises_of
from dosimeter.engines.shifts.convolutions import ConvolutionLayer, find_convolutions
from dosimeter.engines.shifts.judging import LARGEST_ERROR_BAR
from dosimeter.engines.shifts.recover import doubt_of_size
from dosimeter.interfaces import Exposure
from dosimeter.network.tape import Tape, tensors_of
from dosimeter.types import JoinedSamples, MapEstimate, MapLayer, Outcome, Refused

CARRIED_ERROR = 3.0  # by how much the walk and the layers between may enlarge the error of the maps that were read
SOLVED_SLACK = 4.0  # over the error that the misfit of the walk's equations explains


def carry_maps(exposure: Exposure, layer: str, own: Refused, *, seed: int = 0) -> MapEstimate:
    """The inputs of `layer` from the maps that another layer's gradient shows. `own`: why the layer's own does not.

    Certified are maps that follow from certified ones, by equations that all gradients on the way fulfil.
    """
    reason = own.details["layers"][0]["reason"]
    try:
        descent = descend(exposure, seed=seed)
    except Refused:
        raise Refused(f"{own}. No other layer shows maps that could lead to them", details=own.details) from None
    tape, tensors = descent.tape, tensors_of(exposure.model, torch.float64)
    known = {one.value: one.maps for one in descent.known if one.whole and one.freedom is None}
    shown = next(one for one in find_convolutions(exposure) if one.name == layer)
    value = _received(tape, shown)
    if value is None or not tape.follows_from(value, known):
        raise Refused(f"{own}{_walked(descent, value)}", details=own.details) from None
    (maps,) = tape.run(known, tensors, [value])
    bars = _error_bars(descent, value)
    doubt = descent.doubt or doubt_of_size(exposure.public, len(maps))
    proved = bool(descent.certified.all()) and not doubt
    certified = (bars < LARGEST_ERROR_BAR) & proved
    tried = [_tried(one, descent, reason) for one in find_convolutions(exposure) if one.name in (layer, descent.start)]
    return MapEstimate(
        maps=maps.reshape(len(maps), -1, shown.height, shown.width),
        layer=layer,
        layers=tuple(tried),
        batch_size=len(maps),
        certified=certified,
        error_bars=bars,
        samples=_join(descent, known, tensors, layer) if proved else None,
        premises=premises_of(exposure.public) if bool(certified.any()) else (),
        outcome=Outcome.COMPLETED if bool(certified.all()) else Outcome.PARTIAL,
        message=doubt or f"these maps follow from those of {descent.start}, since {reason}",
    )


def _received(tape: Tape, layer: ConvolutionLayer) -> int | None:
    """The value that the layer receives, before an operation that pads it."""
    output = tape.layer(f"{layer.name}.weight" if layer.name else "weight")
    value = None if output is None else tape.operation(output).sources[0]
    entries = layer.weight.shape[1] * layer.groups * layer.positions
    while value and math.prod(tape.shape(value)[1:]) != entries:
        sources = tape.operation(value).sources
        value = sources[0] if len(sources) == 1 else None
    return value


def _error_bars(descent: Descent, value: int) -> Tensor:
    """(B,): the start's own, and what the misfit of each solved map that this one follows from leaves open."""
    used = set(descent.tape.ancestors([value], [one.value for one in descent.known]))
    solved = [one.condition * one.misfit + one.factor_error for one in descent.known[1:] if one.value >= min(used)]
    return torch.hypot(CARRIED_ERROR * descent.error_bars, descent.error_bars.new_tensor(SOLVED_SLACK * max(solved, default=0.0)))


def _tried(layer: ConvolutionLayer, descent: Descent, reason: str) -> MapLayer:
    read = layer.name == descent.start
    return MapLayer(
        name=layer.name,
        positions=layer.positions,
        most_samples=layer.most_samples,
        certified=int(descent.certified.sum()) if read else 0,
        reason="" if read else reason,
        channels=layer.channels,
    )


def _join(descent: Descent, known: Mapping[int, Tensor], tensors: Mapping[str, Tensor], layer: str) -> JoinedSamples | None:
    """All maps, the feature and the label of each sample; None where the features do not follow."""
    tape = descent.tape
    features = tape.operation(descent.head).sources[0]
    if not tape.follows_from(features, known):
        return None
    following = [value for value, name in descent.names.items() if name != layer and value != features and tape.follows_from(value, known)]
    *maps, found = tape.run(known, tensors, [*following, features])
    labels = descent.labels if descent.labels is not None and descent.labels.ndim == 1 else None
    by_name = {descent.names[value]: as_grid(one) for value, one in zip(following, maps)}
    misfits = {descent.names[one.value]: one.misfit for one in descent.known if one.value in descent.names}
    return JoinedSamples(maps=by_name, features=found, labels=labels, misfits=misfits)


def _walked(descent: Descent, value: int | None) -> str:
    reason = descent.reasons.get(-1 if value is None else value)
    if reason is not None:
        return f". The walk down from {descent.start} does not tell them: {reason.removeprefix('in part: ')}"
    return f". Nor do they follow from the maps of {descent.start}"
