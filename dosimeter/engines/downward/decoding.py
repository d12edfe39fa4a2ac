"""A first guess of the inputs: a linear decoder from maps to pictures, trained on noise with the spectrum of photographs.

The server runs the model on such noise, and fits pictures to maps by ridge regression. One map's position tells one patch of the picture,
by the same weights everywhere. So a few hundred pictures are enough. The guess has the coarse shapes, where steps from grey end in wrong
ones.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Generator, Tensor

from dosimeter.engines.downward.inversion import MapTargets
from dosimeter.engines.downward.walk import KnownMap
from dosimeter.normalization import from_pixels
from dosimeter.types import Normalization

TRAINING_PICTURES = 192
MOST_FEATURES = 4096
RIDGE = 0.3  # of the mean square of a feature
MARGIN = 0.02  # of the range: guesses stay that far inside, where a step can still move them
LIGHT, CONTRAST = 0.47, 0.22  # of photographs, in pixels
SHARED, OWN = 0.9, 0.45  # of the contrast: by all colours, and by each
STEEPNESS = 1.3  # of the spectrum, as a power of the frequency


def decode(targets: MapTargets, shape: tuple[int, ...], normalization: Normalization, rng: Generator) -> Tensor | None:
    """Inputs (B, *shape) that a linear decoder sees in the maps; None for inputs or maps without a grid."""
    used = _maps_of_one_grid(targets)
    if len(shape) != 3 or not used:
        return None
    noise = photographic_noise(TRAINING_PICTURES, shape, rng)
    like, samples = used[0].maps, len(used[0].maps)
    with torch.no_grad():
        passes = [
            targets.tape.run({0: from_pixels(part, normalization)}, targets.tensors, [one.value for one in used])
            for part in noise.to(next(iter(targets.tensors.values()))).split(samples)
            if len(part) == samples
        ]
    trained = [torch.cat(several) for several in zip(*passes)]
    rows, columns = like.shape[2:]
    patch = (-(-shape[1] // rows), -(-shape[2] // columns))
    grid = (rows * patch[0], columns * patch[1])
    pictures = F.interpolate(noise[: len(trained[0])], size=grid, mode="bilinear", antialias=True).to(trained[0])
    features = _features([_sized(one, values, samples) for one, values in zip(used, trained)])
    given = _features([_sized(one, one.maps.to(trained[0]), samples) for one in used])
    patches = F.unfold(pictures, patch, stride=patch).transpose(1, 2).flatten(0, 1)  # (n, C·h·w)
    weights, middle, mean = _ridge(features, patches)
    decoded = ((given - middle) @ weights + mean).unflatten(0, (samples, rows * columns)).transpose(1, 2)
    found = F.interpolate(F.fold(decoded, grid, patch, stride=patch), size=shape[1:], mode="bilinear", antialias=True)
    return from_pixels(found.clamp(MARGIN, 1 - MARGIN), normalization)


def photographic_noise(count: int, shape: tuple[int, ...], rng: Generator) -> Tensor:
    """Pictures (count, *shape) of noise with the spectrum, the light and the contrast of photographs."""
    channels, height, width = shape
    down, right = torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None]
    frequency = (down.square() + right.square()).sqrt().clamp_min(1 / max(height, width)).to(rng.device)
    white = torch.randn(count, channels + 1, height, width // 2 + 1, 2, generator=rng, device=rng.device)
    waves = torch.fft.irfft2(torch.view_as_complex(white) / frequency**STEEPNESS, s=(height, width))
    waves = waves / waves.flatten(2).std(2).mean()
    return (LIGHT + CONTRAST * (SHARED * waves[:, :1] + OWN * waves[:, 1:])).clamp(0, 1)


def _maps_of_one_grid(targets: MapTargets) -> list[KnownMap]:
    """The whole maps on the finest grid."""
    whole = [one for one in targets.maps if one.whole and one.maps.ndim == 4]
    finest = max((one.maps.shape[2:].numel() for one in whole), default=0)
    return [one for one in whole if one.maps.shape[2:].numel() == finest]


def _sized(one: KnownMap, maps: Tensor, samples: int) -> Tensor:
    """Maps whose factor is not known get a root mean square of one, as the known ones do: each sample, or each batch."""
    if one.freedom is None:
        return maps
    parts = maps.unflatten(0, (-1, samples)) if one.freedom == "batch" else maps[:, None]
    return (parts / parts.flatten(1).square().mean(1).sqrt().reshape(-1, 1, 1, 1, 1)).flatten(0, 1)


def _features(maps: list[Tensor]) -> Tensor:
    """(B, C, h, w) each -> (B·h·w, features)"""
    return torch.cat(maps, 1)[:, :MOST_FEATURES].permute(0, 2, 3, 1).flatten(0, 2)


def _ridge(features: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, and the means of features and of what is wanted."""
    middle, mean = features.mean(0), wanted.mean(0)
    centred = (features - middle).double()
    gram = centred.T @ centred
    gram.diagonal().add_(RIDGE * gram.diagonal().mean())
    weights = torch.linalg.solve(gram, centred.T @ (wanted - mean).double())
    return weights.to(features), middle, mean
