"""A look at a received update before anything is attacked: what fits the model and the declared training, and what does not."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dosimeter.client.checks import check_update
from dosimeter.client.kinds import Kind, breaks_class_sums, grid_of, keeps_class_sums, resemblance
from dosimeter.client.sent_tensors import Converted, SentTensors, convert
from dosimeter.client.training import FedAvg
from dosimeter.interfaces import Defense, Loss, Training
from dosimeter.network.head import locate_head
from dosimeter.types import Refused, Update

NAMES_SHOWN = 3
SIZE_SLACK = 1.01  # rounding of a sum that bounds the head's bias
State = Literal["fits", "note", "misfit"]


@dataclass(frozen=True)
class Line:
    """One thing that was looked at."""

    topic: str
    state: State
    text: str


@dataclass(frozen=True)
class Preflight:
    """What fits, what is worth knowing, and what does not fit. `fits` is False where the update would be misread."""

    lines: tuple[Line, ...]
    converted: Converted | None = field(default=None, repr=False, compare=False)

    @property
    def fits(self) -> bool:
        return self.misfits == ()

    @property
    def misfits(self) -> tuple[str, ...]:
        return tuple(line.text for line in self.lines if line.state == "misfit")

    def __str__(self) -> str:
        """The table, one line a topic."""
        topics, states = (max(len(getattr(line, name)) for line in self.lines) for name in ("topic", "state"))
        return "\n".join(f"{line.state:{states}}  {line.topic:{topics}}  {line.text}" for line in self.lines)


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What the receiver says about an update."""

    kind: Kind
    input_shape: tuple[int, ...]
    classes: int
    batch_size: int | None
    training: Training
    loss: Loss
    output_shape: tuple[int, ...] | None = None  # as in `Public`
    defenses: Sequence[Defense] = ()
    check_kind: bool = True

    @property
    def is_changed(self) -> bool:
        """Whether the entries that were sent are not those that training gave."""
        return any(d.distorts() or d.scaling() != "none" for d in self.defenses if d.side in ("training", "update"))


def look_at(model: nn.Module, sent: SentTensors, declared: Declared) -> Preflight:
    """Every check in order. What later checks rest on comes first, and a misfit there ends the look."""
    lines = list(_names(sent))
    try:
        check_update(sent.parameters, dict(model.named_parameters()))
        _check_buffers(sent, model)
        unit, decay = (1.0, 1.0) if declared.kind == "gradient" else _unit(declared)
        _check_trained(model, declared)
    except ValueError as error:
        return Preflight((*lines, Line("tensors", "misfit", str(error))))
    if sent.unknown:
        return Preflight(tuple(lines))
    lines.append(_precision(sent, model))
    head = _head_of(model, declared)
    lines.append(_kind(sent.parameters, model, declared, head, decay))
    converted = convert(sent, model, declared.kind, unit, decay)
    if lines[-1].state != "misfit":
        lines.extend(_frozen(converted, declared))
        lines.extend(_batch_norms(model, converted.buffers, declared))
        lines.append(_size(converted.update, declared, head))
        lines.extend(_bounds(converted.update, sent.parameters, model, declared))
    return Preflight(tuple(lines), converted)


def _unit(declared: Declared) -> tuple[float, float]:
    """What a change of weights is divided by, and what the weights before are multiplied by."""
    try:
        return declared.training.unit(declared.batch_size), declared.training.decay(declared.batch_size)
    except Refused as refusal:
        if "batch size" in str(refusal):
            raise
        asked = f"kind {declared.kind!r} needs the client's learning rate and steps"
        raise ValueError(f"training: {asked}, such as training=dm.FedAvg(learning_rate=0.01, steps=4); {refusal}") from None


def _check_trained(model: nn.Module, declared: Declared) -> None:
    """Refuse a declared training that freezes layers which the model lacks."""
    if isinstance(declared.training, FedAvg):
        declared.training.trained(name for name, parameter in model.named_parameters() if parameter.requires_grad)


def _check_buffers(sent: SentTensors, model: nn.Module) -> None:
    own = dict(model.named_buffers(remove_duplicate=False))
    for name, buffer in sent.buffers.items():
        if buffer.shape != own[name].shape:
            raise ValueError(f"update.{name}: expected shape {tuple(own[name].shape)} as in the model, got {tuple(buffer.shape)}")
        if buffer.is_complex() or (buffer.is_floating_point() and not torch.isfinite(buffer).all()):
            raise ValueError(f"update.{name}: expected finite real numbers in this buffer")


def _names(sent: SentTensors) -> Iterator[Line]:
    counts = f"{len(sent.parameters)} parameters and {len(sent.buffers)} buffers"
    if sent.unknown:
        yield Line("tensors", "misfit", f"update: the model has no parameter {sent.unknown[0]!r}{_more(sent.unknown)}")
    elif sent.absent:
        yield Line("tensors", "note", f"{counts}; not sent: {_listed(sent.absent)}")
    else:
        yield Line("tensors", "fits", f"{counts}, every trained parameter among them")


def _precision(sent: SentTensors, model: nn.Module) -> Line:
    own = {name: parameter.dtype for name, parameter in model.named_parameters()}
    other = [name for name, tensor in sent.parameters.items() if tensor.dtype != own[name]]
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in sent.parameters.values()})
    if not other:
        return Line("dtype", "fits", f"{' and '.join(kinds)}, as in the model")
    trained = str(own[other[0]]).removeprefix("torch.")
    return Line("dtype", "note", f"sent in {' and '.join(kinds)}, while the model has {trained} in {_listed(other)}")


def _kind(sent: Update, model: nn.Module, declared: Declared, head: str | None, decay: float) -> Line:
    """Whether the numbers are what they are said to be: see `kinds`."""
    if not declared.check_kind:
        return Line("kind", "note", f"{declared.kind}, unchecked")
    weights = dict(model.named_parameters())
    alike, matrix = resemblance(sent, weights, decay), None if head is None else f"{head}.weight".lstrip(".")
    summed = matrix in sent and declared.loss.shift_invariant and keeps_class_sums(sent[matrix], decay * weights[matrix])
    grid = grid_of(sent, weights)
    is_weights = alike is not None and alike.is_weights
    thrown = f"{matrix} moved far, and sums over the classes to what the model's own does, as after training"
    if declared.kind == "weights":
        if alike is None or is_weights:
            return Line("kind", "fits", f"weights after training: {alike}" if alike else "weights: too few entries to tell")
        if summed:
            return Line("kind", "fits", f"weights after training: {thrown}")
        return Line("kind", "misfit", f"update: is no model after training: {alike}; pass the model that was sent, or another kind")
    if is_weights:
        return Line("kind", "misfit", f"update: looks like the weights after training: {alike}; pass kind='weights'")
    if summed:
        return Line("kind", "misfit", f"update: looks like the weights after training: {thrown}; pass kind='weights'")
    if declared.is_changed:
        return Line("kind", "note", f"{declared.kind}, as declared: the defenses changed the digits that would tell")
    if declared.kind == "gradient":
        if grid.is_difference and not (grid.is_reversed and _has_unit_one(declared)):
            order = "before − after" if grid.is_reversed else "after − before"
            remedy = "pass its negative with kind='difference'" if grid.is_reversed else "pass kind='difference'"
            return Line("kind", "misfit", f"update: looks like {order}, not like a gradient: {grid}; {remedy}")
        if (
            matrix in sent
            and declared.loss.shift_invariant
            and breaks_class_sums(sent[matrix], weights[matrix])
            and not _is_tied(model, matrix)
        ):
            said = f"update: looks like steps of Adam or the like, not like a gradient: {matrix} does not sum to zero over the classes"
            return Line("kind", "misfit", f"{said}; pass kind='difference', or declare the defense that changed it")
        return Line("kind", "fits", f"gradient: {grid}" if grid.is_off else "gradient: its digits tell nothing")
    if grid.is_reversed:
        return Line("kind", "misfit", f"update: looks like before − after: {grid}, in that order; pass its negative")
    if grid.is_off:
        remedy = "pass kind='gradient', declare the defense that changed it, or check_kind=False"
        return Line("kind", "misfit", f"update: is not the difference of two models: {grid}; {remedy}")
    return Line("kind", "fits", f"difference: {grid}" if grid.is_difference else "difference: its digits tell nothing")


def _is_tied(model: nn.Module, name: str) -> bool:
    """Whether another layer has this parameter too, whose gradients then add to it."""
    parameter = model.get_parameter(name)
    return sum(other is parameter for _, other in model.named_parameters(remove_duplicate=False)) > 1


def _has_unit_one(declared: Declared) -> bool:
    try:
        return declared.training.unit(declared.batch_size) == 1
    except Refused:
        return False


def _frozen(converted: Converted, declared: Declared) -> Iterator[Line]:
    if isinstance(declared.training, FedAvg) and (moved := [name for name in converted.update if declared.training.freezes(name)]):
        yield Line("frozen", "misfit", f"update: {_listed(moved)} moved, and training.frozen says that the client does not train it")
    if converted.thawed:
        said = (
            f"update: {_listed(converted.thawed)} moved, and the model has it frozen; call requires_grad_(True) on what the client trains"
        )
        yield Line("frozen", "misfit", said)
    if converted.unmoved:
        yield Line("frozen", "note", f"no entry moved in {_listed(converted.unmoved)}: taken as layers that the client does not train")


def _batch_norms(model: nn.Module, buffers: dict[str, Tensor], declared: Declared) -> Iterator[Line]:
    """What batch norm's counters say of the client's mode and steps."""
    counted: list[int] = []
    for name, module in model.named_modules():
        key = f"{name}.num_batches_tracked" if name else "num_batches_tracked"
        if not isinstance(module, _BatchNorm) or key not in buffers or module.num_batches_tracked is None:
            continue
        batches = int(buffers[key]) - int(module.num_batches_tracked)
        if (batches > 0) != module.training:
            mode, remedy = ("train", "model.train()") if batches > 0 else ("eval", "model.eval()")
            said = f"update.{key}: the client's batch norm counted {batches} batches, so it was in {mode} mode; call {remedy}"
            yield Line("mode", "misfit", f"{said} before receiving")
            return
        counted.append(batches)
    if not counted or not any(counted):
        mode = "train" if any(module.training for module in model.modules()) else "eval"
        yield Line("mode", "fits" if counted else "note", f"{mode}, " + ("as batch norm's counters say" if counted else "as declared"))
        return
    batches, steps = declared.training.local_batches(declared.batch_size), declared.training.local_steps(declared.batch_size)
    if batches is None:
        yield Line(
            "mode", "note", f"train; batch norm counted {max(counted)} mini-batches, and nothing declared tells how many a step takes"
        )
    elif max(counted) != batches:
        declares = f"{steps} steps" if batches == steps else f"{batches} in {steps} steps"
        said = f"update: batch norm counted {max(counted)} batches, and the declared training has {declares}"
        remedy = f"declare steps={max(counted)}" if batches == steps else "check its epochs or steps, mini_batch and accumulate"
        yield Line("steps", "note" if declared.kind == "gradient" else "misfit", f"{said}; {remedy}")
    else:
        passed = f"{steps} steps" if batches == steps else f"{batches} batches in {steps} steps"
        yield Line("mode", "fits", f"train, and {passed}, as batch norm's counters say")


def _size(update: Update, declared: Declared, head: str | None) -> Line:
    """Whether the declared training can move the head's bias as far as it moved.

    The gradient of the head's bias is a mean of gradients at the logits, whose L1 norm a loss bounds. A sum of such gradients is bounded
    by the sum of their weights.
    """
    gain = declared.training.gain(declared.batch_size)
    bound = math.inf if gain is None else declared.loss.steepest(declared.classes) * gain * SIZE_SLACK
    bias = None if declared.is_changed or declared.defenses or head is None else update.get(f"{head}.bias".lstrip("."))
    if bias is None or not math.isfinite(bound):
        return Line("training", "note", "no bound tells whether the declared training explains the update's size")
    moved = float(bias.double().abs().sum())
    allowed = bound + torch.finfo(bias.dtype).eps * bias.numel() * moved
    said = f"the head's bias has an update of L1 norm {moved:.3g}, and the declared loss and training allow {bound / SIZE_SLACK:.3g}"
    if moved <= allowed:
        return Line("training", "fits", said)
    rates = "the learning rate and the steps" if declared.kind != "gradient" else "the units, a mean over the batch"
    return Line("training", "misfit", f"update: {said}: no data explain it; check {rates}")


def _bounds(update: Update, sent: Update, model: nn.Module, declared: Declared) -> Iterator[Line]:
    """Whether steps that are clipped, or divided by the gradients' own sizes, can move the weights as far as they moved."""
    if declared.kind == "gradient" or declared.is_changed or declared.defenses:
        return
    training, own = declared.training, dict(model.named_parameters())
    unit, steps = training.unit(declared.batch_size), training.local_steps(declared.batch_size)
    entry, norm = training.largest_entry(declared.batch_size), training.largest_norm(declared.batch_size)
    kind = max((sent[name].dtype for name in sent), key=lambda dtype: torch.finfo(dtype).eps)
    largest = max(float(own[name].detach().abs().max()) for name in update if update[name].numel())
    slack = torch.finfo(kind).eps * largest * (steps + 1) / unit  # of rounding the weights after each step and on their way
    changes = torch.cat([change.detach().double().flatten() for change in update.values()])
    if math.isfinite(entry):
        moved = float(changes.abs().max())
        said = f"an entry moved by {moved * unit:.3g}, and the declared optimiser allows {entry * unit:.3g}"
        yield _bounded(moved <= entry * SIZE_SLACK + slack, said, "the learning rate and the steps")
    if math.isfinite(norm):
        moved = float(changes.norm())
        said = f"the weights moved by a norm of {moved * unit:.3g}, and clipped steps allow {norm * unit:.3g}"
        yield _bounded(moved <= norm * SIZE_SLACK + slack * math.sqrt(len(changes)), said, "max_norm, the learning rate and the steps")


def _bounded(fits: bool, said: str, suspects: str) -> Line:
    return Line("training", "fits", said) if fits else Line("training", "misfit", f"update: {said}: no data explain it; check {suspects}")


def _head_of(model: nn.Module, declared: Declared) -> str | None:
    try:
        return locate_head(model, declared.input_shape, allow_shift=declared.loss.shift_invariant)[0]
    except Exception:  # a model without a head, or that cannot run on probes
        return None


def _listed(names: Sequence[Any]) -> str:
    return ", ".join(map(str, names[:NAMES_SHOWN])) + _more(names, NAMES_SHOWN)


def _more(names: Sequence[Any], shown: int = 1) -> str:
    return f" and {len(names) - shown} more" if len(names) > shown else ""
