"""So that a killed run of hours resumes: its tensors on disk every so often, and a picture of where it stands."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dosimeter.engines.matching.recipe import Recipe
from dosimeter.interfaces import Exposure
from dosimeter.normalization import to_pixels
from dosimeter.types import Normalization, Update


@dataclasses.dataclass(frozen=True)
class Keeper:
    """Where a run keeps its state, and how often."""

    folder: Path
    every: float  # seconds


EVERY = 60.0  # seconds between two checkpoints, where nobody says otherwise
FOLDER = "checkpoints"  # in a run's own folder
NEAR = 1e-3  # of a layer's norm: updates no further apart are one update, computed twice

_keeper: ContextVar[Keeper | None] = ContextVar("keeper", default=None)


@contextmanager
def keeping(folder: str | Path | None, every: float | None = None) -> Iterator[None]:
    """Attacks inside this block write checkpoints and a preview into `folder`, and resume from what they find there; None: they do not."""
    if every is not None and not 0 <= every < math.inf:
        raise ValueError(f"checkpoint_every: expected seconds, 0 or more, got {every}")
    token = _keeper.set(None if folder is None else Keeper(Path(folder), EVERY if every is None else every))
    try:
        yield
    finally:
        _keeper.reset(token)


class Checkpoint:
    """The checkpoint of one run, under a name that depends on everything that the run depends on but the update.

    A GPU gives a gradient's last bits anew each time, so the update is held against a sketch of it in the file instead.
    """

    def __init__(self, exposure: Exposure, recipe: Recipe, start: Tensor, targets: Tensor | None) -> None:
        keeper = _keeper.get()
        self.every = keeper.every if keeper else 0.0
        self.normalization = exposure.public.normalization
        self.file = keeper.folder / f"matching-{_fingerprint(exposure, recipe, start, targets)}.safetensors" if keeper else None
        self.sketch = _sketch(exposure.update) if keeper else None  # (layers, 2)
        self.last = time.monotonic()

    def load(self, device: torch.device) -> dict[str, Tensor] | None:
        """What an earlier run on the same update left, or None; a torn file counts as none."""
        if self.file is None or self.sketch is None or not self.file.exists():
            return None
        try:
            # cloned, since sums over tensors that lie as in the file, unaligned, differ in the last bit
            kept = {name: tensor.clone() for name, tensor in load_file(self.file, device=str(device)).items()}
            apart = (kept.pop("update").cpu() - self.sketch).abs()
        except (SafetensorError, OSError, KeyError):
            return None
        norms = self.sketch[:, :1]
        return kept if bool((apart <= NEAR * (norms + NEAR * norms.max())).all()) else None

    @property
    def due(self) -> bool:
        return self.file is not None and time.monotonic() - self.last >= self.every

    def save(self, tensors: dict[str, Tensor], samples: Tensor) -> None:
        """Write all or nothing, then the preview of the samples (B, *shape) beside it."""
        assert self.file is not None
        self.file.parent.mkdir(parents=True, exist_ok=True)
        partial = self.file.with_suffix(".partial")
        assert self.sketch is not None
        save_file({name: tensor.contiguous() for name, tensor in {**tensors, "update": self.sketch}.items()}, partial)
        os.replace(partial, self.file)
        write_preview(samples, self.normalization, self.file.with_suffix(".png"))
        self.last = time.monotonic()

    def remove(self) -> None:
        """The run is done: nothing is left to resume, and its pictures are in its record."""
        if self.file is not None:
            self.file.unlink(missing_ok=True)
            self.file.with_suffix(".png").unlink(missing_ok=True)


def write_preview(samples: Tensor, normalization: Normalization, file: Path) -> None:
    """A grid of the samples (B, channels, height, width) as a picture; other inputs have none."""
    if samples.ndim != 4 or samples.shape[1] not in (1, 3):
        return
    from PIL import Image

    pixels = to_pixels(samples.detach().float(), normalization).clamp(0, 1).cpu()
    columns = max(1, int(len(pixels) ** 0.5 + 0.999))
    empty = -len(pixels) % columns
    pixels = torch.cat([pixels, pixels.new_ones(empty, *pixels.shape[1:])])
    rows = [torch.cat(list(pixels[i : i + columns]), dim=2) for i in range(0, len(pixels), columns)]
    grid = (torch.cat(rows, dim=1) * 255).round().byte().expand(3, -1, -1)
    Image.fromarray(grid.permute(1, 2, 0).numpy()).save(file)


def _fingerprint(exposure: Exposure, recipe: Recipe, start: Tensor, targets: Tensor | None) -> str:
    """Of the recipe, the protocol, the model, the labels and the start, the last of which stands for the seed."""
    public = exposure.public
    protocol = (public.training, public.loss, public.train_mode, public.normalization)
    problem = (dataclasses.replace(recipe, seconds=None), protocol, tuple(exposure.update), exposure.model.state_dict(), targets, start)
    digest = hashlib.sha256()
    for part in _parts(problem):
        digest.update(part)
    return digest.hexdigest()[:16]


def _sketch(update: Update) -> Tensor:
    """Of every layer its norm and its product with a fixed vector: (layers, 2)."""
    layers = [change.detach().flatten().double().cpu() for change in update.values()]
    return torch.stack([torch.stack([layer.norm(), layer @ torch.arange(len(layer), dtype=torch.float64).cos()]) for layer in layers])


def _parts(value: object) -> Iterator[bytes]:
    """All that a value is made of, tensors to the last bit: `repr` would round and shorten them."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        yield value.detach().cpu().flatten().contiguous().view(torch.uint8).numpy().tobytes()
    elif isinstance(value, Mapping):
        yield from _parts(tuple(value.items()))
    elif isinstance(value, float):
        yield f"{value:.5g}".encode()  # a weight may come from a distance, and its last digits from a GPU
    elif isinstance(value, frozenset):
        yield from _parts(tuple(sorted(value)))  # another process has another order
    elif isinstance(value, tuple):
        yield f"{len(value)} parts".encode()
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield type(value).__qualname__.encode()
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        yield repr(value).encode()
