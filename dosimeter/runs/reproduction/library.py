"""The images, weights and trained models of the tables: from the data folder, the bundled sets and a cache."""

from __future__ import annotations

import contextlib
import copy
import os
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dosimeter.artefacts import fingerprint, write_tensors
from dosimeter.config import describe, digest
from dosimeter.data.dataset import ImageSet, select
from dosimeter.data.load import load_images
from dosimeter.data.parts import Part
from dosimeter.metrics.lpips import WEIGHTS_VARIABLE as LPIPS_VARIABLE
from dosimeter.models.backbone import load_backbone
from dosimeter.models.loading import ModelConfig, load_weights
from dosimeter.network.input_shape import find_head_name
from dosimeter.normalization import from_pixels
from dosimeter.registry import DATASETS
from dosimeter.runs.audited_client import MOST_ACCURACY_IMAGES, build_model, measure_accuracy, train_model
from dosimeter.runs.reproduction.tables import Row, RowData
from dosimeter.types import Batch

DATA_VARIABLE = "DOSIMETER_DATA"
SET_ENDINGS = (".npz", ".zip", "")  # of a data set's file; "" is a folder


def default_data() -> Path | None:
    return Path(os.environ[DATA_VARIABLE]) if os.environ.get(DATA_VARIABLE) else None


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dosimeter"


@dataclass(frozen=True, kw_only=True)
class Library:
    """Data sets and weights by name. Each is read, or trained, once."""

    data: Path | None = field(default_factory=default_data)
    cache: Path = field(default_factory=default_cache)
    _read: dict[tuple[str, Part, int | None, int | None], ImageSet] = field(default_factory=dict, init=False, repr=False)
    _models: dict[str, nn.Module] = field(default_factory=dict, init=False, repr=False)
    _accuracies: dict[str, dict[str, Any]] = field(default_factory=dict, init=False, repr=False)

    def available(self, name: str, stand_in: str | None) -> str:
        """The set to use: `name` where it is bundled or in the data folder, else its stand-in. Without either, an error names the file."""
        if name in DATASETS or self._find(name) is not None:
            return name
        if stand_in is not None:
            return self.available(stand_in, None)
        if self.data is None:
            raise FileNotFoundError(f"{name}.npz: this table needs it; say where it lies with --data DIR or {DATA_VARIABLE}")
        raise FileNotFoundError(f"{self.data / name}.npz: this table needs it, and there is no such file (nor {name}.zip, nor a folder)")

    def images(self, name: str, part: Part, data: RowData) -> ImageSet:
        """A part of a set, at the size and with the channels of a row."""
        key = (name, part, data.size, data.channels)
        if key not in self._read:
            source = name if name in DATASETS else self._find(name)
            assert source is not None
            self._read[key] = load_images(source, part=part, size=data.size, channels=data.channels)
        return self._read[key]

    def weights(self, name: str) -> Path:
        """The weights file under `weights` in the data folder whose name starts with `name`."""
        folder = self.data / "weights" if self.data is not None else None
        found = sorted(folder.glob(f"{name}*")) if folder is not None else []
        if not found:
            raise FileNotFoundError(
                f"{(folder or Path('DIR/weights')) / name}*: this table needs these weights; --data DIR or {DATA_VARIABLE}"
            )
        return found[0]

    def offer_lpips(self) -> None:
        """Let the LPIPS metric read its weights from the data folder, unless the environment names another file."""
        with contextlib.suppress(FileNotFoundError):
            os.environ.setdefault(LPIPS_VARIABLE, str(self.weights("lpips")))

    def model(self, config: ModelConfig, data: RowData, images: ImageSet, seed: int, *, backbone: str | None = None) -> nn.Module:
        """The model of a row: with weights from the data folder, trained here once, or drawn from `seed`.

        With a `backbone`, the backbone's weights are loaded and only the head is drawn.
        """
        if not is_trained(config):
            drawn = build_model(replace(config, seed=seed), images)
            if backbone is not None:
                load_backbone(drawn, self.weights(backbone), head=find_head_name(drawn, tuple(images.images.shape[1:])))
            return drawn
        key = _model_key(config, data, images)
        if key not in self._models and config.weights is not None:
            self._models[key] = build_model(replace(config, weights=str(self.weights(config.weights))), images)
        elif key not in self._models:
            self._models[key] = self._train_or_load(config, data, images)
        return self._models[key]

    def decoder_path(self, row: Row) -> Path:
        """The file of a row's decoder. Rows with the same model and auxiliary images share one."""
        images = (row.data.name, row.data.size, row.data.channels, describe(row.data.normalization), describe(row.data.auxiliary))
        depends = {name: describe(getattr(row, name)) for name in ("model", "backbone", "decoder")} | {"images": list(images)}
        return self.cache / "decoders" / f"{row.model.name}-{digest(depends)}.safetensors"

    def accuracy(self, config: ModelConfig, data: RowData, images: ImageSet) -> dict[str, Any]:
        """The accuracy of a trained model on the test part, which no model here is trained on."""
        if not is_trained(config):
            return {"accuracy": None, "accuracy_on": "not measured: untrained"}
        key = _model_key(config, data, images)
        if key not in self._accuracies:
            tests = self.images(_name(images), "test", data)
            judged = Batch(from_pixels(tests.images[:MOST_ACCURACY_IMAGES], data.normalization), tests.labels[:MOST_ACCURACY_IMAGES])
            value = measure_accuracy(copy.deepcopy(self.model(config, data, images, config.seed)).cpu(), judged)
            self._accuracies[key] = {"accuracy": value, "accuracy_on": f"{len(judged.inputs)} test images"}
        return self._accuracies[key]

    def _train_or_load(self, config: ModelConfig, data: RowData, images: ImageSet) -> nn.Module:
        """The model trained on the train part, or read from the cache, where a hash of all that it depends on names the file."""
        lessons = self.images(_name(images), "train", data)
        if data.trained_on is not None:
            lessons = select(lessons, torch.arange(min(data.trained_on, len(lessons))))
        model = build_model(config, images)
        depends = {"model": describe(config), "normalization": describe(data.normalization), "data": content_hash(lessons)}
        path = self.cache / "models" / f"{config.name}-{digest(depends)}.safetensors"
        if path.is_file():
            load_weights(model, path)
            return model
        train_model(model, Batch(from_pixels(lessons.images, data.normalization), lessons.labels), config.epochs, config.seed)
        write_tensors(path, model.state_dict())
        return model

    def _find(self, name: str) -> Path | None:
        if self.data is None:
            return None
        return next((path for ending in SET_ENDINGS if (path := self.data / f"{name}{ending}").exists()), None)


def is_trained(config: ModelConfig) -> bool:
    return config.weights is not None or config.epochs > 0


@lru_cache(maxsize=64)  # keyed by the identity of the image set
def content_hash(images: ImageSet) -> str:
    return fingerprint(images.images, images.labels)


def _model_key(config: ModelConfig, data: RowData, images: ImageSet) -> str:
    normalization, name = describe(data.normalization), _name(images)
    return digest({"model": describe(config), "data": [name, data.size, data.channels, data.trained_on], "normalization": normalization})


def _name(images: ImageSet) -> str:
    """The library's name of a set that it has read."""
    return images.name if images.name in DATASETS else Path(images.origin).stem
