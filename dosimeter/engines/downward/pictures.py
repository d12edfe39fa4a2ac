"""From an exposure to its pictures: exact maps of one layer, the walk down, and the inversion of what it reaches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.downward.decoding import decode
from dosimeter.engines.downward.equations import read_slopes
from dosimeter.engines.downward.inversion import Inversion, MapTargets, invert, narrowest
from dosimeter.engines.downward.layers import Layer, as_grid, find_layers
from dosimeter.engines.downward.norms import fix_norms, keeps_statistics
from dosimeter.engines.downward.slopes import Backward, Gate
from dosimeter.engines.downward.walk import LARGEST_MISFIT, KnownMap, Walk, walk_down
from dosimeter.engines.shifts.convolutions import ConvolutionLayer, find_convolutions
from dosimeter.engines.shifts.layout import NoLayout
from dosimeter.engines.shifts.recover import LayerMaps, declared_noise, doubt_of_maps, recover_layer
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head, find_head
from dosimeter.network.tape import Tape, record, tensors_of
from dosimeter.normalization import from_pixels, input_bounds
from dosimeter.types import Refused

PROBES = 2  # inputs of the pass that shows which operations a model is made of
START_SPREAD = 0.1  # of the first guess around grey, in pixels
NOISE_SLACK = 3.0
OPEN_SLACK = 2.0  # over the least positive entry of the first layer's maps, up to which an entry may be open or closed
HARD_LABEL = 0.99  # of one class, from which on a soft label is a hard one


@dataclass(frozen=True, kw_only=True)
class Descent:
    """The maps that the gradients prove, as far down as they go."""

    tape: Tape
    head: int  # the value of the head's output
    start: str  # the layer whose maps the shifts of its kernel show
    certified: Tensor  # (B,) bool: the start's
    error_bars: Tensor  # (B,) relative, of the start's
    known: tuple[KnownMap, ...]  # the start first
    names: Mapping[int, str]  # the layer that receives each value
    reasons: Mapping[int, str]  # why a value was left, or a part of it
    cut: tuple[int, Tensor] | None  # the lowest known value that all slopes come through, and the slopes there
    labels: Tensor | None  # (B,) class ids or (B, C) soft labels, where the head's gradient tells them
    doubt: str  # why nothing is certified; "" where the update is one gradient

    @property
    def lowest(self) -> KnownMap:
        return min(self.known, key=lambda one: one.value)

    @property
    def determines_inputs(self) -> bool:
        """Whether a sample's maps have as many known entries as its inputs."""
        entries = sum(int(one.known.sum()) for one in narrowest(self.tape, self.known, self.head))
        return entries >= math.prod(self.tape.inputs)


def descend(exposure: Exposure, *, layer: str | None = None, seed: int = 0) -> Descent:
    """Read the maps of one layer from which all that follows can be computed, and walk down from there."""
    probe = record(exposure.model, _zeros(exposure, PROBES))
    layers = find_layers(probe, exposure.update)
    head = find_head(exposure)
    head_value = probe.layer(_weight(head.name))
    sources = {one.weight: source for source, several in layers.items() for one in several}
    reasons: list[str] = []
    best: Descent | None = None
    for one in _candidates(exposure, layer, probe, sources, head_value):
        try:
            found = recover_layer(exposure, one, batch_size=exposure.public.batch_size, seed=seed)
        except NoLayout as refusal:
            reasons.append(f"{one.name}: {refusal}")
            continue
        walked = _walk(exposure, one, found, head)
        if best is None or walked.lowest.value < best.lowest.value:
            best = walked
        if len(walked.known) > 1:
            break
    if best is not None:
        return best
    rest = f"; {'; '.join(reasons[-3:])}" if reasons else ""
    raise Refused(f"maps: no layer's gradient shows its maps, so that there is nothing to draw from{rest}")


def draw(
    exposure: Exposure,
    descent: Descent,
    rng: Generator,
    *,
    steps: int,
    products: int,
    variation: float = 0.0,
    seconds: float | None = None,
) -> Inversion:
    """The inputs whose maps are those of the descent."""
    tape, tensors = fix_norms(descent.tape, tensors_of(exposure.model))
    targets = MapTargets(tape=tape, tensors=tensors, maps=narrowest(tape, descent.known, descent.head))
    like = next(exposure.model.parameters())
    noise = torch.randn(tape.inputs, generator=rng, device=rng.device, dtype=like.dtype).to(like)
    grey = from_pixels((0.5 + START_SPREAD * noise).clamp(0, 1), exposure.public.normalization)
    guess = decode(targets, tape.inputs[1:], exposure.public.normalization, rng)
    return invert(
        targets,
        grey if guess is None else guess,
        input_bounds(exposure.public.normalization, grey),
        steps=steps,
        products=products,
        variation=variation,
        joint=_samples_meet(targets, grey),
        seconds=seconds,
    )


def labels_of(exposure: Exposure, descent: Descent, inputs: Tensor) -> Tensor | None:
    """The labels of drawn inputs, where the head's gradient fits their features; for maps that do not determine the head's input."""
    head = find_head(exposure)
    tensors = tensors_of(exposure.model, torch.float64)
    return _head_slopes(exposure, descent.tape, tensors, (0, inputs.double()), head, descent.head)[1]


def _candidates(exposure: Exposure, layer: str | None, tape: Tape, sources: Mapping[str, int], head: int | None) -> list[ConvolutionLayer]:
    """The layers to read, from the input on; first those whose maps determine the head's output, since the walk begins behind them."""
    every = [one for one in find_convolutions(exposure) if layer in (None, one.name)]
    if not every:
        raise Refused(f"maps: the client sent no gradient of a layer {layer!r} that has maps")
    readable = [one for one in every if not one.obstacle and _weight(one.name) in sources]
    if not readable:
        raise Refused(f"maps: no layer's gradient shows its maps: {every[-1].name}: {every[-1].obstacle}")
    return sorted(readable, key=lambda one: head is None or not tape.follows_from(head, [sources[_weight(one.name)]]))


def _walk(exposure: Exposure, layer: ConvolutionLayer, found: LayerMaps, head: Head) -> Descent:
    tape = record(exposure.model, _zeros(exposure, len(found.maps)))
    layers = find_layers(tape, exposure.update)
    value = tape.before_reshaping(
        next(source for source, several in layers.items() if any(one.weight == _weight(layer.name) for one in several))
    )
    maps = found.maps.double().reshape(tape.shape(value)).contiguous()
    start = KnownMap(value=value, maps=maps, known=torch.ones_like(maps, dtype=torch.bool), misfit=found.misfit)
    backward = Backward(tape, tensors_of(exposure.model, torch.float64))
    small = maps <= OPEN_SLACK * float(maps[maps > 0].min())
    backward.put(value, Gate(maps=maps, opened=maps > 0, known=start.known, doubtful=small, suspect=small & (maps > 0)))
    head_value = tape.layer(_weight(head.name))
    labels, reason = None, ""
    if head_value is not None and tape.follows_from(head_value, [value]):
        slopes, labels, reason = _head_slopes(exposure, tape, backward.tensors, (value, maps), head, head_value)
        if slopes is not None:
            backward.anchors[head_value] = slopes
            if layer.non_negative and not _statistics_between(tape, value, head_value):
                backward.put_all_behind(value, head_value)
    elif len(found.slopes.shape) == len(tape.shape(value)):
        backward.anchors |= _slopes_above(backward, layers, layer, found, value)
    if not layer.non_negative or not backward.anchors:
        known, reasons = (start,), {value: reason or "its inputs can be negative, so that a backward pass has no gates"}
    else:
        walked = walk_down(backward, layers, start, tolerance=_tolerance(exposure, layer))
        known, reasons = walked.known, walked.reasons
        turn = known[-1]
        if (
            head_value is not None
            and turn.freedom is not None
            and turn.value in backward.gates
            and tape.follows_from(head_value, [turn.value])
        ):
            again, labels, backward = _walk_from(
                exposure, layers, turn, backward.gates[turn.value], head, head_value, tape, _tolerance(exposure, layer)
            )
            known, reasons = (*known[:-1], *again.known), again.reasons or reasons
    if labels is None and head_value is not None:
        behind = next((one for one in known[1:] if one.freedom is None and tape.follows_from(head_value, [one.value])), None)
        if behind is not None:
            _, labels, _ = _head_slopes(exposure, tape, backward.tensors, (behind.value, behind.maps), head, head_value)
    return Descent(
        tape=tape,
        head=tape.output if head_value is None else head_value,
        start=layer.name,
        certified=found.certified,
        error_bars=found.error_bars,
        known=known,
        names=_names(layers),
        reasons=reasons,
        cut=_cut(backward, known),
        labels=labels,
        doubt=doubt_of_maps(exposure.public),
    )


def _walk_from(
    exposure: Exposure,
    layers: Mapping[int, list[Layer]],
    start: KnownMap,
    gate: Gate,
    head: Head,
    head_value: int,
    tape: Tape,
    tolerance: float,
) -> tuple[Walk, Tensor | None, Backward]:
    """Walk down from a map from which all that follows can be computed, whatever its factor; with the labels that it shows."""
    backward = Backward(tape, tensors_of(exposure.model, torch.float64))
    backward.put(start.value, gate)
    slopes, labels, reason = _head_slopes(exposure, tape, backward.tensors, (start.value, start.maps), head, head_value)
    if slopes is None:
        return Walk(known=(start,), reasons={start.value: reason}), None, backward
    backward.anchors[head_value] = slopes
    backward.put_all_behind(start.value, head_value)
    return walk_down(backward, layers, start, tolerance=tolerance), labels, backward


def _cut(backward: Backward, known: Sequence[KnownMap]) -> tuple[int, Tensor] | None:
    tape = backward.tape
    for one in sorted(known, key=lambda one: one.value):
        if one.value and one.freedom is None and backward.anchors and tape.follows_from(tape.output, [one.value]):
            slopes = backward.slopes(one.value)
            if slopes is not None:
                return one.value, slopes
    return None


def _statistics_between(tape: Tape, start: int, end: int) -> bool:
    """Whether a norm with statistics of its own lies between: its derivative depends on the values that it receives."""
    between = (tape.operation(one) for one in tape.ancestors([end], [start]) if one > start)
    return any(keeps_statistics(operation) for operation in between)


def _slopes_above(
    backward: Backward, layers: Mapping[int, list[Layer]], start: ConvolutionLayer, found: LayerMaps, value: int
) -> dict[int, Tensor]:
    """The slopes that the first layer's gradient shows, and those of layers whose inputs follow from its maps.

    Where a shortcut leads past the first layer, slopes at the sum behind it let the walk go down the shortcut too.
    """
    tape = backward.tape
    own = tape.layer(_weight(start.name))
    assert own is not None
    read = found.slopes.double().reshape(tape.shape(own)).contiguous()
    lifted = backward.lift(own, read)
    anchors = {own: read} if lifted is None else {own: read, lifted[0]: lifted[1]}
    for source, several in layers.items():
        if source <= value or not tape.follows_from(source, [value]):
            continue
        (maps,) = tape.run({value: backward.gates[value].maps}, backward.tensors, [source])
        for layer in several:
            slopes = read_slopes(layer, as_grid(maps)) if layer.groups == 1 else None
            lifted = None if slopes is None else backward.lift(layer.output, slopes.reshape(tape.shape(layer.output)))
            if lifted is not None:
                anchors[lifted[0]] = lifted[1]
    return anchors


def _head_slopes(
    exposure: Exposure, tape: Tape, tensors: Mapping[str, Tensor], known: tuple[int, Tensor], head: Head, value: int
) -> tuple[Tensor | None, Tensor | None, str]:
    """The slopes at the logits (B, C) by least squares from the head's gradient, and the labels that they show; or why not.

    With the features F (B, H) known, ∇W = Δᵀ F.
    """
    if head.weight_gradient is None:
        return None, None, "the head's gradient, which tells the slopes behind the maps, is withheld"
    features, logits = tape.run(dict([known]), tensors, [tape.operation(value).sources[0], value])
    if features.ndim != 2 or len(features) > features.shape[1]:
        return None, None, "the batch has more samples than the head has features"
    slopes = (head.weight_gradient.double() @ torch.linalg.pinv(features)).T  # (B, C)
    misfit = float((slopes.T @ features - head.weight_gradient).norm() / head.weight_gradient.double().norm())
    if not misfit < NOISE_SLACK * max(1e-3, _noise_share(head.weight_gradient, exposure)):
        return None, None, f"the features that follow from the maps do not explain the head's gradient (misfit {misfit:.1g})"
    return slopes, _labels(exposure, logits, slopes), ""


def _labels(exposure: Exposure, logits: Tensor, slopes: Tensor) -> Tensor | None:
    """Softmax cross-entropy has the slope (p − y) / B at the logits."""
    if not exposure.public.loss.shift_invariant or logits.shape[1] < 2:
        return None
    soft = logits.softmax(1) - len(logits) * slopes
    return soft.argmax(1) if bool((soft.amax(1) > HARD_LABEL).all()) else soft.clamp_min(0)


def _tolerance(exposure: Exposure, layer: ConvolutionLayer) -> float:
    return max(LARGEST_MISFIT, NOISE_SLACK * _noise_share(layer.gradient, exposure))


def _noise_share(gradient: Tensor, exposure: Exposure) -> float:
    return declared_noise(gradient, exposure.public) / max(float(gradient.double().square().mean().sqrt()), 1e-300)


def _samples_meet(targets: MapTargets, inputs: Tensor) -> bool:
    """Whether a sample's maps depend on other samples, as behind batch norm in train mode."""
    if len(inputs) == 1:
        return False
    changed = inputs.clone()
    changed[1:] += 0.1
    with torch.no_grad():
        before, after = targets.residuals(inputs)[0], targets.residuals(changed)[0]
    return not torch.allclose(before, after, rtol=1e-3, atol=1e-4 * float(before.abs().max()))


def _names(layers: Mapping[int, list[Layer]]) -> dict[int, str]:
    return {source: several[0].weight.removesuffix(".weight") for source, several in layers.items()}


def _zeros(exposure: Exposure, count: int) -> Tensor:
    return torch.zeros(count, *exposure.public.input_shape).to(next(exposure.model.parameters()))


def _weight(name: str) -> str:
    return f"{name}.weight" if name else "weight"
