"""Truth, recovery and nulls of each sample as small PNG pictures for a record."""

from __future__ import annotations

import base64
import io
from typing import Any

import torch
from torch import Tensor

from dosimeter.normalization import to_pixels
from dosimeter.surfaces.assignment import assign
from dosimeter.surfaces.scores import Scores
from dosimeter.types import Batch, Reconstruction

MOST_PICTURES = 16  # of a record


def picture_rows(
    found: Reconstruction, truth: Batch, foreign: Reconstruction | None, reference: Batch | None, scores: Scores
) -> list[dict[str, Any]]:
    """One row a sample, in the truth's order: the private picture, what was recovered of it, and its nulls."""
    private = to_pixels(truth.inputs, found.normalization)
    recovered = to_pixels(found.inputs, found.normalization)
    nulls: dict[str, list[Tensor | None]] = {}
    if foreign is not None:
        pixels = to_pixels(foreign.inputs, foreign.normalization)
        nulls["foreign"] = [pixels[i] if i >= 0 else None for i in assign(pixels, private).tolist()]
    if reference is not None:
        pixels = to_pixels(reference.inputs, found.normalization)
        nearest = torch.cdist(private.flatten(1), pixels.flatten(1)).argmin(1)
        nulls["nearest"] = list(pixels[nearest])
    assert scores.assignment is not None
    rows = []
    for i, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist()):
        rows.append(
            {
                "truth": png(private[i]),
                "recovered": png(recovered[partner]) if partner >= 0 else None,
                "nulls": {name: png(images[i]) for name, images in nulls.items() if images[i] is not None},
                "psnr": float(scores["psnr"][i]),
            }
        )
    return rows


def png(pixels: Tensor | None) -> str | None:
    """(channels, height, width) in [0, 1] as a base64 PNG; what is not finite is drawn as 0."""
    from PIL import Image

    if pixels is None:
        return None
    levels = (pixels.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8).cpu().numpy()
    image = Image.fromarray(levels[0], "L") if len(levels) == 1 else Image.fromarray(levels.transpose(1, 2, 0), "RGB")
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()
