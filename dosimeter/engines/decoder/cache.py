"""Decoders on disk: kept under a hash of all that they depend on, and refused where they do not fit the model."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dosimeter.artefacts import CheckpointFile, fingerprint, fingerprint_of_tensors, read_tensors, write_tensors
from dosimeter.config import describe, digest
from dosimeter.engines.decoder.cost import memory_lacking
from dosimeter.engines.decoder.network import Decoder, Shape
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import train_decoder
from dosimeter.interfaces import Exposure
from dosimeter.normalization import to_pixels
from dosimeter.stopping import saving_before_stop
from dosimeter.types import Refused

KIND = "dosimeter decoder"
SECONDS_BETWEEN_SAVES = 30.0  # of a training in progress


@dataclass(frozen=True, kw_only=True)
class StoredDecoder:
    """A decoder, and where it comes from."""

    decoder: Decoder  # in eval mode, on the target's device
    path: Path
    facts: dict[str, str]  # backbone, auxiliary, settings, error, seconds: as they stand in the file

    @property
    def origin(self) -> str:
        facts = self.facts
        trained = f"decoder trained on {facts['images']} auxiliary images to a squared error of {float(facts['error']):.4f}"
        return "; ".join(filter(None, (trained, facts["notes"])))


def default_folder() -> Path:
    """Where decoders are kept that nobody asked to have elsewhere."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dosimeter" / "decoders"


def obtain(exposure: Exposure, settings: DecoderSettings, path: str | None) -> tuple[Target, StoredDecoder]:
    """The decoder in `path`, or the kept one for this model, auxiliary set and settings, or one that is trained now and kept."""
    target = Target.of(exposure)
    if path is not None:
        return target, load_decoder(Path(path).expanduser(), target)
    return target, train_or_load(target, _auxiliary_pixels(exposure, target), settings)


def kept_decoder(exposure: Exposure, target: Target, settings: DecoderSettings) -> StoredDecoder | None:
    """The decoder that the cache holds for this model, auxiliary set and settings, or None."""
    depends = _dependencies(target, _auxiliary_pixels(exposure, target), settings)
    return _if_it_depends_on(depends, _load_intact(_cached_path(depends), target))


def train_or_load(
    target: Target, pixels: Tensor, settings: DecoderSettings, path: Path | None = None, *, start: StoredDecoder | None = None
) -> StoredDecoder:
    """Train a decoder on auxiliary pixels (N, channels, height, width), from `start` on where given, unless it is kept already.

    An old or damaged decoder in the user's cache is trained anew and replaced. One that the user names as `path` is refused.
    """
    depends = _dependencies(target, pixels, settings)
    if start is not None:
        depends["start"] = start.facts
    if path is None:
        path = _cached_path(depends)
        found = _load_intact(path, target)
    else:
        found = load_decoder(path, target) if path.is_file() else None
        _refuse_foreign_progress(_progress_path(path))
    if (known := _if_it_depends_on(depends, found)) is not None:
        return known
    if lacking := memory_lacking(target, len(pixels), settings):
        raise Refused(lacking)
    keep = CheckpointFile(_progress_path(path), SECONDS_BETWEEN_SAVES, digest(depends))
    with saving_before_stop():
        result = train_decoder(target, pixels, settings, keep, start=None if start is None else start.decoder)
    shape = result.decoder.shape
    facts = {name: json.dumps(value) for name, value in depends.items()}
    facts |= {"kind": KIND, "shape": json.dumps(vars(shape)), "mode": "train" if target.train_mode else "eval"}
    facts |= {"images": str(len(pixels)), "error": repr(result.error), "seconds": f"{result.seconds:.1f}", "notes": "; ".join(result.notes)}
    facts |= {"weights": fingerprint_of_tensors(result.decoder.state_dict())}
    write_tensors(path, result.decoder.state_dict(), facts)
    return StoredDecoder(decoder=result.decoder, path=path, facts=facts)


def load_decoder(path: Path, target: Target) -> StoredDecoder:
    """A decoder from its file; refused, in a sentence, where it is old, damaged or trained for another model."""
    if not path.is_file():
        raise FileNotFoundError(f"decoder: no file {path}; `dosimeter generator train` makes one")
    tensors, facts = _read(path, os.stat(path).st_mtime_ns)
    try:
        stored = json.loads(facts["shape"])
        shape = Shape(**stored | {"feature": tuple(stored["feature"]), "image": tuple(stored["image"])})
        backbone, mode, weights = json.loads(facts["backbone"]), facts["mode"], facts["weights"]
        _check_numbers(facts)
    except (KeyError, TypeError, ValueError):
        raise Refused(f"decoder: {path} is not a decoder that `dosimeter generator train` of this version made; train one anew") from None
    if shape.feature != target.feature_shape or shape.image != target.image_shape:
        takes, gives = target.feature_shape, target.image_shape
        raise Refused(f"the decoder in {path} draws {shape.image} from {shape.feature}, but this model makes {takes} of {gives}")
    if (mode == "train") != target.train_mode:
        raise Refused(f"the decoder in {path} was trained for a model in {mode} mode; the client's is in the other")
    if backbone != target.fingerprint():
        raise Refused(f"the decoder in {path} was trained for other weights of this architecture; train one for these")
    try:
        with torch.device("meta"):  # a shape that the file's weights do not have takes no memory
            Decoder(shape).load_state_dict(tensors, assign=True)
        decoder = Decoder(shape)
        decoder.load_state_dict(tensors)
    except (RuntimeError, TypeError, ValueError):
        raise Refused(f"decoder: {path} was made by another version of dosimeter; train it again") from None
    if weights != fingerprint_of_tensors(tensors):
        raise Refused(f"decoder: {path} was changed after its training, its weights are others; remove it to train a new one")
    decoder = decoder.to(target.device).eval().requires_grad_(False)
    return StoredDecoder(decoder=decoder, path=path, facts=facts)


def _auxiliary_pixels(exposure: Exposure, target: Target) -> Tensor:
    assert exposure.auxiliary is not None
    return to_pixels(exposure.auxiliary.inputs, target.normalization).clamp(0, 1)


def _dependencies(target: Target, pixels: Tensor, settings: DecoderSettings) -> dict[str, Any]:
    """All that decides what a decoder learns."""
    return {"backbone": target.fingerprint(), "auxiliary": _fingerprint(pixels), "settings": describe(settings)}


def _cached_path(depends: Mapping[str, Any]) -> Path:
    return default_folder() / f"decoder-{digest(depends)}.safetensors"


def _if_it_depends_on(depends: Mapping[str, Any], found: StoredDecoder | None) -> StoredDecoder | None:
    same = found is not None and all(found.facts.get(name) == json.dumps(value) for name, value in depends.items())
    return found if same else None


def _load_intact(path: Path, target: Target) -> StoredDecoder | None:
    """The decoder in the cache, or None where there is none that this version can use."""
    try:
        return load_decoder(path, target)
    except (Refused, FileNotFoundError):
        return None


def _check_numbers(facts: Mapping[str, str]) -> None:
    """Raise what `float` and `int` raise where a number that reports need is missing or none."""
    _ = int(facts["images"]), float(facts["error"]), float(facts["seconds"]), facts["notes"]


def _progress_path(path: Path) -> Path:
    """Where a training in progress is saved, whose decoder goes to `path`."""
    return path.with_suffix(".progress")


def _refuse_foreign_progress(path: Path) -> None:
    """Refuse a file in the place of a saved training that no training saved: saving would replace it."""
    if not path.is_symlink() and not path.exists():
        return
    try:
        facts = read_tensors(path)[1] if path.is_file() and not path.is_symlink() else {}
    except ValueError:
        facts = {}
    if not {"key", "epoch"} <= set(facts):
        raise ValueError(f"decoder: {path} is in the way of the training's progress, and no training saved it; choose another file")


@lru_cache(maxsize=2)
def _read(path: Path, changed: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and facts of a file that was last written at `changed`."""
    try:
        return read_tensors(path)
    except ValueError as error:
        raise Refused(f"decoder: {path} is truncated, damaged or not a safetensors file; remove it to train a new one") from error


def _fingerprint(pixels: Tensor) -> str:
    """Of pixels in 16 bits, since their last bits differ between a GPU and a CPU."""
    return fingerprint(repr(tuple(pixels.shape)), (pixels.detach().clamp(0, 1) * 65535).round().to(torch.int32))
