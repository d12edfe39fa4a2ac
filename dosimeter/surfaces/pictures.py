"""Truth, recovery and nulls of each sample as evidence for a record: small PNG pictures, or tables where a sample is no picture."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from dosimeter.columns import Columns
from dosimeter.normalization import to_pixels
from dosimeter.numbers import significant
from dosimeter.surfaces.assignment import assign
from dosimeter.surfaces.scores import Comparison, Scores
from dosimeter.types import Evidence, Exhibit, Reconstruction

MOST_PICTURES = 16  # of a record
MOST_COLUMNS = 24  # of a sample that is no picture
FEWEST_TIMES = 16  # from which on a sample of two axes is a signal over time
MOST_TRACKS = 8  # channels of a signal
TRACK_WIDTH, TRACK_HEIGHT, TRACKS_HEIGHT = 320, 24, 96  # pixels: of a track, its least height, and the height of all where they are few
FINEST_PICTURE = 512  # pixels of a side; a larger picture is shown at every second pixel, or every third


def show_inputs(found: Reconstruction, comparison: Comparison | None, scores: Scores | None) -> list[Evidence]:
    """One piece of evidence a sample, in the truth's order: the private sample, what was recovered of it, and its nulls."""
    kind, draw = _drawing(found, comparison)
    recovered = to_pixels(found.inputs.detach(), found.normalization)
    if comparison is None or scores is None:
        return [Evidence(kind=kind, recovered=draw(sample), sample=i) for i, sample in enumerate(recovered[:MOST_PICTURES])]
    private = to_pixels(comparison.truth.inputs, found.normalization).to(recovered)
    nulls: dict[str, list[Tensor | None]] = {}
    if comparison.foreign is not None:
        pixels = to_pixels(comparison.foreign.inputs, comparison.foreign.normalization).to(recovered)
        nulls["foreign"] = [pixels[i] if i >= 0 else None for i in assign(pixels, private).tolist()]
    if comparison.auxiliary is not None:
        pixels = to_pixels(comparison.auxiliary.inputs, found.normalization).to(recovered)
        nearest = torch.cdist(private.flatten(1), pixels.flatten(1)).argmin(1)
        nulls["nearest"] = list(pixels[nearest])
    assert scores.assignment is not None
    return [
        Evidence(
            kind=kind,
            private=draw(private[i]),
            recovered=draw(recovered[partner]) if partner >= 0 else None,
            nulls={name: draw(image) for name, images in nulls.items() if (image := images[i]) is not None},
            sample=i,
            score=score_of(scores, "columns_right" if "columns_right" in scores else "psnr", i),
        )
        for i, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist())
    ]


def _drawing(found: Reconstruction, comparison: Comparison | None) -> tuple[Literal["image", "table"], Callable[[Tensor], Exhibit]]:
    """How a sample is shown: a picture, curves over time, the named columns of a table, or numbered values."""
    if isinstance(found.normalization, Columns):
        return "table", found.normalization.words
    if _are_pictures(found.inputs):
        return "image", png
    if are_series(tuple(found.inputs.shape[1:])):
        shown = found.inputs if comparison is None else comparison.truth.inputs
        pixels = to_pixels(shown.detach().float(), found.normalization)
        return "image", partial(curves, low=float(pixels.min()), high=float(pixels.max()))
    return "table", columns


def are_series(shape: tuple[int, ...]) -> bool:
    """Whether a sample is a signal over time: (channels, times), several times as many times as channels."""
    return len(shape) == 2 and shape[1] >= FEWEST_TIMES and shape[1] >= 2 * shape[0]


def curves(sample: Tensor, low: float, high: float) -> str:
    """A signal (channels, times) as a PNG, one track a channel, all between `low` and `high`. Of many values a track shows the range."""
    from PIL import Image, ImageDraw

    tracks = sample.detach().float().cpu()[:MOST_TRACKS]
    height = max(TRACK_HEIGHT, TRACKS_HEIGHT // len(tracks))
    image = Image.new("L", (TRACK_WIDTH, height * len(tracks)), 255)
    pen = ImageDraw.Draw(image)
    scale = max(high - low, torch.finfo(torch.float32).tiny)
    for place, track in enumerate(tracks):
        down = place * height + (1 - (track.nan_to_num(low) - low).div(scale).clamp(0, 1)) * (height - 3) + 1
        across = torch.arange(len(track)) * (TRACK_WIDTH - 1) / max(len(track) - 1, 1)
        if place:
            pen.line([(0, place * height), (TRACK_WIDTH, place * height)], fill=210)
        pen.line([(float(x), float(y)) for x, y in zip(across, down)], fill=0)
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def score_of(scores: Scores, metric: str, sample: int) -> float | None:
    """One sample's score; None where it is a miss, or where the metric was not computed."""
    value = float(scores[metric][sample]) if metric in scores else math.nan
    return value if math.isfinite(value) else None


def columns(sample: Tensor) -> dict[str, str]:
    """A sample that is no picture, such as a row of a table, as numbered values."""
    values = sample.flatten()[:MOST_COLUMNS].tolist()
    return {f"column {i + 1}": significant(value) if math.isfinite(value) else "–" for i, value in enumerate(values)}


def strips(vectors: Sequence[Tensor | None]) -> list[Exhibit]:
    """Each vector as a picture of small squares, twice as wide as high, all on one scale of grays."""
    known = [vector.detach().float().flatten() for vector in vectors if vector is not None]
    low, high = min(float(v.min()) for v in known), max(float(v.max()) for v in known)
    scale = max(high - low, torch.finfo(torch.float32).tiny)
    return [None if vector is None else png(_wrap((vector.detach().float().flatten() - low) / scale)) for vector in vectors]


def png(pixels: Tensor | None) -> str | None:
    """(channels, height, width) in [0, 1] as a base64 PNG; what is not finite is drawn as 0."""
    from PIL import Image

    if pixels is None:
        return None
    step = -(-max(pixels.shape[1:]) // FINEST_PICTURE)
    levels = (pixels.detach().float().nan_to_num(0.0).clamp(0, 1) * 255).round().to(torch.uint8)[:, ::step, ::step].cpu().numpy()
    image = Image.fromarray(levels[0], "L") if len(levels) == 1 else Image.fromarray(levels.transpose(1, 2, 0), "RGB")
    file = io.BytesIO()
    image.save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def _are_pictures(inputs: Tensor) -> bool:
    return inputs.ndim == 4 and inputs.shape[1] in (1, 3)


def _wrap(vector: Tensor) -> Tensor:
    """(H,) as (1, rows, columns), about twice as wide as high; what is left over is white."""
    width = math.ceil(math.sqrt(2 * len(vector)))
    padded = torch.nn.functional.pad(vector, (0, -len(vector) % width), value=1.0)
    return padded.reshape(1, -1, width)
