"""Pictures in black and white that lie alone in a bin of an inserted layer, where a defense rounded or pruned entries."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.engines.bins.contents import SAME_SAMPLE, bin_gradients, reach_of_bins
from dosimeter.engines.bins.inserted_layer import LAYER_NAMES, InsertedLayer
from dosimeter.engines.cancelling_labels import sums_may_pass
from dosimeter.engines.recursion.black_and_white import Rows, black_and_white, reach_of
from dosimeter.engines.row_errors import quotients_keep_their_scale
from dosimeter.engines.sample_share import takes_local_steps
from dosimeter.interfaces import Exposure


def black_and_white_bins(exposure: Exposure, layer: InsertedLayer, found: Tensor) -> Tensor:
    """The pictures (n, d) beside those that were found (m, d): alone in a bin, or in the last row that answers."""
    public, sent = exposure.public, exposure.update
    blurred = any(defense.distorts() for defense in public.defenses)
    if not blurred or takes_local_steps(public.training) or not quotients_keep_their_scale(public, sent, LAYER_NAMES):
        return found[:0]
    gradients = tuple(sent[name].double() for name in ("rows.weight", "rows.bias"))
    reaches = tuple(reach_of(sent[name], public) for name in ("rows.weight", "rows.bias"))
    weight, bias = (torch.cat(pair) for pair in zip(gradients, bin_gradients(layer, *gradients), strict=True))
    weight_reach, bias_reach = (torch.cat([reach, reach_of_bins(layer, reach)]) for reach in reaches)
    rows = Rows(weight=weight, bias=bias, weight_reach=weight_reach, bias_reach=bias_reach)
    pictures = black_and_white(rows, public.input_shape, public.normalization)[1].to(found)
    pictures = pictures[~sums_may_pass(exposure, pictures)]
    known = torch.cdist(pictures, found) <= SAME_SAMPLE * pictures.norm(dim=1, keepdim=True)
    return pictures[~known.any(1)]
