"""Norms with statistics of their own: batch norm in train mode, group norm, layer norm and instance norm.

Such a norm gives the same for its input and for any multiple of it. So a map in front of one is known up to a factor: one for the whole
batch in train mode, one for each sample otherwise.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch.nn.functional as F
from torch import Tensor

from dosimeter.network.tape import Named, Operation, Tape, Value

ARGUMENTS = {
    F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
    F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
}
Freedom = Literal["sample", "batch"]  # what shares one unknown factor


def keeps_statistics(operation: Operation) -> bool:
    """Whether an operation is a norm over statistics of what it receives."""
    if operation.function is F.batch_norm:
        return given(operation).get("training") is True
    return operation.function in (F.group_norm, F.layer_norm, F.instance_norm)


def given(norm: Operation) -> dict[str, Any]:
    """The arguments of a batch norm or a group norm by name."""
    return {"eps": 1e-5} | dict(zip(ARGUMENTS[norm.function], norm.arguments)) | norm.options


def multiplied(norm: Operation, received: Tensor, tensors: Mapping[str, Tensor]) -> Tensor | None:
    """What a norm gives for other inputs with the statistics of `received`, up to a constant: γ / σ times the inputs.

    None for norms other than batch norm and group norm.
    """
    if norm.function not in ARGUMENTS:
        return None
    named, values = given(norm), received.detach()
    wide = [1] * (values.ndim - 2)
    if norm.function is F.group_norm:
        variance = values.reshape(len(values), named["num_groups"], -1).var(2, correction=0)  # (B, groups)
        variance = variance.repeat_interleave(values.shape[1] // named["num_groups"], 1).reshape(*values.shape[:2], *wide)
    else:
        variance = values.var([0, *range(2, values.ndim)], correction=0, keepdim=True)
    weight = tensors[named["weight"].name].reshape(1, -1, *wide) if named.get("weight") is not None else 1.0
    return received * (weight / (variance + named["eps"]).sqrt())


def fix_norms(tape: Tape, tensors: Mapping[str, Tensor]) -> tuple[Tape, dict[str, Tensor]]:
    """The tape with a product and a sum in the place of batch norms in eval mode, which is what they are; and the tensors that it needs."""
    fixed, chosen = dict(tensors), []
    for output, operation in enumerate(tape.operations, start=1):
        if operation.function is not F.batch_norm or keeps_statistics(operation):
            continue
        named = given(operation)
        scale = (tensors[named["running_var"].name] + named["eps"]).rsqrt()
        scale = scale if named.get("weight") is None else scale * tensors[named["weight"].name]
        shift = -tensors[named["running_mean"].name] * scale
        shift = shift if named.get("bias") is None else shift + tensors[named["bias"].name]
        fixed |= dict(zip(affine_names(output), (scale, shift)))
        chosen.append(output)
    return replace_norms(tape, chosen), fixed


def replace_norms(tape: Tape, outputs: Sequence[int]) -> Tape:
    """The tape with a product and a sum in the place of some norms. Their factors go by `affine_names`."""
    operations = list(tape.operations)
    for output in outputs:
        old = tape.operation(output)
        arguments = (Value(old.sources[0]), *(Named(name) for name in affine_names(output)))
        operations[output - 1] = replace(old, function=multiply_and_add, arguments=arguments, options={})
    return replace(tape, operations=tuple(operations))


def affine_names(output: int) -> tuple[str, str]:
    return f"scale of value {output}", f"shift of value {output}"


def multiply_and_add(maps: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
    wide = (1, -1, *([1] * (maps.ndim - 2)))
    return maps * scale.reshape(wide) + shift.reshape(wide)


def norm_behind(tape: Tape, output: int) -> Operation | None:
    """The norm with statistics of its own that alone receives a layer's output."""
    after = [tape.operation(one) for one in tape.consumers(output)]
    return after[0] if len(after) == 1 and keeps_statistics(after[0]) else None


def freedom_before(tape: Tape, outputs: Sequence[int]) -> Freedom | None:
    """What of the layers' input shares a factor that the norms behind them do not see.

    A bias of the layer fixes the factor, unless batch norm takes it away with the mean.
    """
    norms = [norm_behind(tape, one) for one in outputs]
    biased = [len(tape.operation(one).names) > 1 for one in outputs]
    if any(norm is not None and norm.function is F.batch_norm for norm in norms):
        return "batch"
    return None if any(biased) else "sample"
