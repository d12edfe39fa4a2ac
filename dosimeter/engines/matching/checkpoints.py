"""The checkpoint of one matching run: under a name that says what the run depends on, and with a picture of where the run stands."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch import Tensor

from dosimeter.artefacts import atomic_write, checkpoint_file, fingerprint, remove_file, saves_checkpoints
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.interfaces import Exposure
from dosimeter.normalization import to_pixels
from dosimeter.stopping import saving_before_stop
from dosimeter.types import Normalization, Update

SAME_UPDATE = 1e-3  # of a layer's norm: updates no further apart are one update, computed twice


class Checkpoint:
    """The checkpoint of one run. Its name depends on all inputs of the run except the update.

    A GPU computes the last bits of a gradient differently each time. So the file holds a sketch of the update, and a run resumes
    where the sketches agree. Outside of `save_checkpoints` nothing is written.
    """

    def __init__(self, exposure: Exposure, recipe: Recipe, start: Tensor, targets: Tensor | None) -> None:
        self.normalization = exposure.public.normalization
        self.file = self.sketch = None
        if saves_checkpoints():
            self.file = checkpoint_file(f"matching-{_fingerprint(exposure, recipe, start, targets)}.safetensors")
            self.sketch = _sketch(exposure.update)  # (layers, 2)

    def load(self, device: torch.device) -> dict[str, Tensor] | None:
        """What an earlier run on the same update left, or None; a torn file counts as none."""
        found = self.file.load(device) if self.file is not None else None
        if found is None or self.sketch is None or "update" not in found[0]:
            return None
        tensors, _ = found
        if tensors["update"].shape != self.sketch.shape:
            return None
        difference = (tensors.pop("update").cpu() - self.sketch).abs()
        norms = self.sketch[:, :1]
        return tensors if bool((difference <= SAME_UPDATE * (norms + SAME_UPDATE * norms.max())).all()) else None

    def saving_before_stop(self) -> AbstractContextManager[None]:
        """Inside this block, a signal waits for the next checkpoint, where there are checkpoints."""
        return nullcontext() if self.file is None else saving_before_stop()

    @property
    def due(self) -> bool:
        return self.file is not None and self.file.due

    def save(self, tensors: dict[str, Tensor], samples: Tensor) -> None:
        """Write all or nothing, then the preview of the samples (B, *shape) beside it."""
        assert self.file is not None
        assert self.sketch is not None
        self.file.save({**tensors, "update": self.sketch})
        write_preview(samples, self.normalization, self.file.path.with_suffix(".png"))

    def remove(self) -> None:
        """The run is done: nothing is left to resume, and its pictures are in its record."""
        if self.file is not None:
            self.file.remove()
            remove_file(self.file.path.with_suffix(".png"))


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
    with atomic_write(file) as unfinished:
        Image.fromarray(grid.permute(1, 2, 0).numpy()).save(unfinished, "PNG")


def _fingerprint(exposure: Exposure, recipe: Recipe, start: Tensor, targets: Tensor | None) -> str:
    """A hash of the recipe, the protocol, the model, the labels and the start. The start stands for the seed."""
    public = exposure.public
    protocol = (public.training, public.loss, public.train_mode, public.normalization)
    problem = (dataclasses.replace(recipe, seconds=None), protocol, tuple(exposure.update), exposure.model.state_dict(), targets, start)
    return fingerprint(*_parts(problem))


def _sketch(update: Update) -> Tensor:
    """Every layer's norm, and its product with a fixed vector: (layers, 2)."""
    layers = [change.detach().flatten().double().cpu() for change in update.values()]
    return torch.stack([torch.stack([layer.norm(), layer @ torch.arange(len(layer), dtype=torch.float64).cos()]) for layer in layers])


def _parts(value: object) -> Iterator[str | Tensor]:
    """The parts of a value, with every bit of its tensors. `repr` would round and shorten tensors."""
    if isinstance(value, Tensor):
        yield f"{value.dtype} {tuple(value.shape)}"
        yield value
    elif isinstance(value, Mapping):
        yield from _parts(tuple(value.items()))
    elif isinstance(value, float):
        yield f"{value:.5g}"  # a weight may come from a distance, and its last digits from a GPU
    elif isinstance(value, frozenset):
        yield from _parts(tuple(sorted(value)))  # another process has another order
    elif isinstance(value, tuple):
        yield f"{len(value)} parts"
        for item in value:
            yield from _parts(item)
    elif dataclasses.is_dataclass(value):
        yield type(value).__qualname__
        yield from _parts({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    else:
        yield repr(value)
