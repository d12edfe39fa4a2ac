"""What a decoder draws without this client's gradient: the measure of how much of a picture is the decoder's own."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import decode_without_slope
from dosimeter.interfaces import Exposure
from dosimeter.normalization import from_pixels, to_pixels

MOMENTS = 64  # auxiliary images that the mean feature is taken over at most


def decoder_nulls(
    exposure: Exposure, target: Target, decoder: Decoder, rng: Generator, *, count: int, features: Tensor | None = None
) -> dict[str, Tensor]:
    """Images (count, *shape), in the model's scale, that owe nothing to the private batch, or not to its features' order.

    `foreign features`: the decoder fed features of auxiliary images, as another client's would be; `mean feature`: fed their
    mean; `shuffled features`: fed the recovered features with each one's entries in random order, which keeps how large they
    are and nothing of what they say.
    """
    drawn: dict[str, Tensor] = {}
    if features is not None:
        order = torch.rand(features.shape, generator=rng, device=rng.device).argsort(1).to(features.device)
        drawn["shuffled features"] = decode_without_slope(decoder, features.gather(1, order))
    if exposure.auxiliary is not None:
        images = exposure.auxiliary.inputs
        chosen = torch.randperm(len(images), generator=rng, device=rng.device)[: max(MOMENTS, count)].to(images.device)
        pixels = target.images(to_pixels(images[chosen], target.normalization))
        known = target.features_in_batches(pixels, max(2, min(count, len(pixels))))  # (m, H), in batches as large as the client's
        drawn["foreign features"] = decode_without_slope(decoder, known[:count])
        drawn["mean feature"] = decode_without_slope(decoder, known.mean(0, keepdim=True)).expand(count, -1, -1, -1)
    return {name: from_pixels(pixels, target.normalization) for name, pixels in drawn.items()}
