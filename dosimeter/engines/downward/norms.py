"""Norms with statistics of their own: batch norm in train mode, group norm, layer norm and instance norm.

Such a norm gives the same for its input and for any multiple of it. So a map in front of one is known up to a factor: one for the whole
batch in train mode, one for each sample otherwise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch.nn.functional as F

from dosimeter.network.tape import Operation, Tape

BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
Freedom = Literal["sample", "batch"]  # what shares one unknown factor


def keeps_statistics(operation: Operation) -> bool:
    """Whether an operation is a norm over statistics of what it receives."""
    if operation.function is F.batch_norm:
        return (dict(zip(BATCH_NORM, operation.arguments)) | operation.options).get("training") is True
    return operation.function in (F.group_norm, F.layer_norm, F.instance_norm)


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
