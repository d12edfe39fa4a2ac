"""Two pictures laid over each other: the shift and the mirroring at which they correlate most."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import interpolate, pad

LARGEST_SHIFT = 4  # a picture may be shifted by a quarter of its side
LARGEST_SIDE = 64  # pixels; larger pictures are reduced before they are compared
PAIRS_AT_ONCE = 2**22  # numbers of the correlations that are held at a time


@dataclass(frozen=True, eq=False)
class Overlay:
    """How each picture fits best on each picture of a gallery."""

    correlation: Tensor  # (n, N), at most 1
    shift: Tensor  # (n, N, 2) rows and columns by which the first picture must be moved, in its own pixels
    mirrored: Tensor  # (n, N) bool: the first picture is mirrored before it is moved


def overlay(pictures: Tensor, gallery: Tensor) -> Overlay:
    """The largest normalised cross-correlation over shifts and mirrorings of (n, C, H, W) on (N, C, H, W).

    Brightness of each channel and contrast cancel. A shifted picture leaves a margin, which counts as its mean.
    """
    scale = max(1.0, max(pictures.shape[2:]) / LARGEST_SIDE)
    small = [_reduced(side, scale) for side in (pictures, gallery)]
    plain, mirrored = (_peaks(first, small[1]) for first in (small[0], small[0].flip(3)))
    better = mirrored[0] > plain[0]
    shift = torch.where(better[..., None], mirrored[1], plain[1])
    return Overlay(torch.where(better, mirrored[0], plain[0]), (shift * scale).round().long(), better)


def register(pictures: Tensor, truth: Tensor) -> Tensor:
    """Each picture moved, and mirrored if need be, onto its own partner; the margin repeats the edge: (B, C, H, W)."""
    moved = []
    for picture, partner in zip(pictures, truth):
        found = overlay(picture[None], partner[None])
        turned = picture.flip(2) if bool(found.mirrored) else picture
        moved.append(_move(turned, *found.shift.flatten().tolist()))
    return torch.stack(moved) if moved else pictures


def _move(picture: Tensor, down: int, right: int) -> Tensor:
    height, width = picture.shape[1:]
    wide = pad(picture[None], (max(right, 0), max(-right, 0), max(down, 0), max(-down, 0)), mode="replicate")[0]
    return wide[:, max(-down, 0) : max(-down, 0) + height, max(-right, 0) : max(-right, 0) + width]


def _reduced(pictures: Tensor, scale: float) -> Tensor:
    pictures = pictures.to(torch.promote_types(pictures.dtype, torch.float32))
    if scale > 1:
        size = [max(1, round(side / scale)) for side in pictures.shape[2:]]
        pictures = interpolate(pictures, size=size, mode="area")
    centred = pictures - pictures.mean((2, 3), keepdim=True)
    return centred / centred.flatten(1).norm(dim=1)[:, None, None, None].clamp_min(1e-9)


def _peaks(pictures: Tensor, gallery: Tensor) -> tuple[Tensor, Tensor]:
    """The peak (n, N) of every correlation within the allowed shifts, and where it lies (n, N, 2)."""
    height, width = pictures.shape[2:]
    down, right = height // LARGEST_SHIFT, width // LARGEST_SHIFT
    size = (height + down, width + right)
    ours, theirs = (torch.fft.rfft2(side, s=size) for side in (pictures, gallery))  # zeros behind: no shift wraps around
    step = max(1, PAIRS_AT_ONCE // (len(gallery) * size[0] * size[1]))
    values, places = [], []
    for few in ours.split(step):
        found = torch.fft.irfft2(torch.einsum("ncij,mcij->nmij", few.conj(), theirs), s=size)
        window = found.roll((down, right), (2, 3))[..., : 2 * down + 1, : 2 * right + 1].flatten(2)
        peak, place = window.max(2)
        values.append(peak)
        places.append(torch.stack([place // (2 * right + 1) - down, place % (2 * right + 1) - right], -1))
    return torch.cat(values), torch.cat(places)
