"""How many operations a model takes, by a count that is the same on every machine."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.leftovers import nothing_kept

FLOPS_A_SECOND = 7.5e10  # of the one core that counts are turned into seconds for; only the order of magnitude matters


def forward_flops(model: nn.Module, sample: Tensor) -> float | None:
    """Multiplications and additions of one forward pass of a sample (1, *shape); None where the model takes no single sample."""
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), nothing_kept(model), counter:
            deep_copy(model)(sample)
    except Exception:  # batch norm in train mode, say, takes no single sample everywhere
        return None
    return float(counter.get_total_flops())
