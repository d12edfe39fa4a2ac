"""How many operations a model takes, by a count that is the same on every machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.probing import output_of

FLOPS_A_SECOND = 7.5e10  # of the one core that counts are turned into seconds for; only the order of magnitude matters


def count_flops(run: Callable[[], object]) -> float:
    """Multiplications and additions of matrices in what `run` does."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        run()
    return float(counter.get_total_flops())


def forward_flops(model: nn.Module, sample: Any) -> float | None:
    """Multiplications and additions of one forward pass of a sample (1, *shape); None where the model takes no single sample."""
    try:
        with nothing_kept(model):
            return count_flops(lambda: output_of(deep_copy(model), sample))
    except Exception:  # batch norm in train mode, say, takes no single sample everywhere
        return None
