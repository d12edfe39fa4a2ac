"""Crops of the photographs that come with scikit-learn and scikit-image."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from dosimeter.data.bundled import packaged_file
from dosimeter.data.dataset import ImageSet
from dosimeter.data.pixels import convert_channels, decode, square
from dosimeter.options import OptionError, PositiveInt
from dosimeter.registry import DATASETS

PHOTOGRAPHS = {
    "astronaut": ("skimage", "data/astronaut.png"),
    "cat": ("skimage", "data/chelsea.png"),
    "coffee": ("skimage", "data/coffee.png"),
    "galaxies": ("skimage", "data/hubble_deep_field.jpg"),
    "motorcycle": ("skimage", "data/motorcycle_left.png"),
    "retina": ("skimage", "data/retina.jpg"),
    "rocket": ("skimage", "data/rocket.jpg"),
    "tissue": ("skimage", "data/ihc.png"),
    "temple": ("sklearn", "datasets/images/china.jpg"),
    "flower": ("sklearn", "datasets/images/flower.jpg"),
}
DISTRIBUTIONS = {"skimage": "scikit-image", "sklearn": "scikit-learn"}
USUAL_CROPS = 64
FLAT_CROP_DEVIATION = 0.02  # a crop with a smaller standard deviation of pixels shows nothing, such as sky


@DATASETS.register("photographs")
def photographs(*, size: PositiveInt = 32, crops: PositiveInt | None = None) -> ImageSet:
    """Crops of ten colour photographs, labelled by photograph; no two crops share a pixel.

    Each photograph is cut into a grid of squares, as large as gives `crops` of them that are not flat; the most varied
    are kept and shrunk to `size`. So every partition of the set is disjoint in pixels too. Without `crops`: as many as
    every photograph can give, 64 at most. Photographs as in scikit-image 0.24 and scikit-learn 1.5.
    """
    pictures = {name: _picture(*where) for name, where in PHOTOGRAPHS.items()}
    integrals = {name: _integrals(picture) for name, picture in pictures.items()}
    most = {name: int((_spread(integrals[name], size) > FLAT_CROP_DEVIATION).sum()) for name in pictures}
    scarcest = min(most, key=lambda name: most[name])
    count = crops or max(1, min(USUAL_CROPS, most[scarcest]))
    if count > most[scarcest]:
        limit = f"the photograph {scarcest!r} gives at most {most[scarcest]} of {size} pixels that do not overlap"
        raise OptionError("crops" if crops else "size", f"{limit}, and {count} were asked for")
    return ImageSet(
        name="photographs",
        images=torch.cat([_crops(picture, integrals[name], count, size) for name, picture in pictures.items()]),
        labels=torch.arange(len(pictures)).repeat_interleave(count),
        class_names=tuple(pictures),
        origin="photographs inside the scikit-image and scikit-learn packages",
    )


def _picture(package: str, relative: str) -> Tensor:
    path = packaged_file(package, relative, DISTRIBUTIONS[package])
    return convert_channels(decode(path.read_bytes(), path), 3)


def _crops(picture: Tensor, integrals: Tensor, count: int, size: int) -> Tensor:
    """(3, H, W) -> (count, 3, size, size) in reading order, from the coarsest grid that has enough varied squares."""
    height, width = picture.shape[1:]
    for side in range(math.isqrt(height * width // count), size - 1, -1):
        spread = _spread(integrals, side)  # (rows, columns)
        if int((spread > FLAT_CROP_DEVIATION).sum()) >= count:
            tiles = picture.unfold(1, side, side).unfold(2, side, side)  # (3, rows, columns, side, side)
            tiles = tiles.permute(1, 2, 0, 3, 4).flatten(0, 1)  # (rows * columns, 3, side, side)
            return square(tiles[spread.flatten().topk(count).indices.sort().values], size)
    raise AssertionError(f"a grid of {size} pixels was counted to hold {count} crops")


def _integrals(picture: Tensor) -> Tensor:
    """Sums over the rectangle above and left of each corner, of the pixels and of their squares: (2, H + 1, W + 1)."""
    moments = torch.stack([picture.double().mean(0), picture.double().square().mean(0)])  # (2, H, W)
    return functional.pad(moments.cumsum(1).cumsum(2), (1, 0, 1, 0))


def _spread(integrals: Tensor, side: int) -> Tensor:
    """The standard deviation within each square of a grid, over pixels and channels: (rows, columns)."""
    mean, mean_square = integrals[:, ::side, ::side].diff(dim=1).diff(dim=2) / side**2
    return (mean_square - mean.square()).clamp(min=0).sqrt()
