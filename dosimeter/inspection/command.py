"""`dosimeter inspect`: from the words of the command line to an exit code."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from dosimeter.config import construct, override, read_toml, resolve_paths
from dosimeter.data.dataset import ImageSet
from dosimeter.data.load import load_images
from dosimeter.inspection.inspect import Inspection, inspect
from dosimeter.models.loading import ModelConfig, load_model, load_weights
from dosimeter.models.weight_files import TORCH_SUFFIXES
from dosimeter.network.input_shape import find_input_shape
from dosimeter.normalization import from_pixels
from dosimeter.options import first_line
from dosimeter.registry import MODELS, options_of
from dosimeter.types import Batch, Normalization

SAMPLES = 64  # of the client's data, on which the checks run the model


def run_inspect(words: Sequence[str], *, reference: str | None = None, data: str | None = None, as_json: bool = False) -> int:
    """Inspect the model that the words name and print the findings. Returns 1 where it is suspicious, else 0.

    The first word is a TOML file with an audit's [model] table, an architecture's name, or `module:function`. The others
    override the table, as in `model.weights=received.safetensors model.classes=100`. Code that the table names runs only where
    `allow_code` allows its module. `reference` is the weights file of the round before, for the same architecture. `data` are the
    client's images. A model that cannot be inspected raises a ValueError or an OSError with one sentence.
    """
    try:
        found = _inspect_named(words, reference, data)
    except (ValueError, OSError):
        raise
    except Exception as error:  # whatever a stranger's model does
        raise ValueError(f"inspect: this model cannot be looked at: {type(error).__name__}: {first_line(error)}") from error
    sys.stdout.write(json.dumps(_plain(found), ensure_ascii=False, indent=2) + "\n" if as_json else f"{found}\n")
    return 1 if found.suspicious else 0


def _inspect_named(words: Sequence[str], reference: str | None, data: str | None) -> Inspection:
    if not words:
        raise ValueError("inspect: expected a TOML file, an architecture's name or module:function")
    name, *assignments = words
    if Path(name).suffix in (".safetensors", *TORCH_SUFFIXES):
        raise ValueError(
            f"inspect: {name} holds weights and not the network that they belong to; name it, as in: inspect resnet20 model.weights={name}"
        )
    content = resolve_paths(read_toml(name), Path(name).parent) if name.endswith(".toml") else {"model": {"name": name}}
    content = override(content, assignments)
    config = construct(ModelConfig, content.get("model", {}), "model")
    size = config.options.get("size")
    images = None if data is None else load_images(data, size=size if isinstance(size, int) else None)
    model = _build(config, images, config.weights)
    previous = None if reference is None else _build(config, images, reference)
    normalization = construct(Normalization, content.get("data", {}).get("normalization", {}), "data.normalization")
    batch = None if images is None else _batch(images, model, normalization)
    return inspect(model, batch, previous)


def _build(config: ModelConfig, images: ImageSet | None, weights: str | None) -> nn.Module:
    options = dict(config.options)
    if images is not None and ":" not in config.name:
        known = {option.name for option in options_of(MODELS.entry(config.name, "model"))}
        inferred = {"channels": images.images.shape[1], "size": images.images.shape[-1]}
        if len(images.class_names) > 1:  # one folder of images says nothing of classes
            inferred["classes"] = len(images.class_names)
        options = {key: value for key, value in inferred.items() if key in known} | options
    model = load_model(config.name, options, None, config.seed)
    if weights is not None:
        load_weights(model, Path(weights))
    return model


def _batch(images: ImageSet, model: nn.Module, normalization: Normalization) -> Batch:
    """Samples spread evenly over the images in the order of their labels, in the scale that the model takes."""
    order = images.labels.argsort(stable=True)
    spread = order[:: max(1, len(order) // SAMPLES)][:SAMPLES]
    inputs = from_pixels(images.images[spread], normalization)
    if inputs.shape[1:] != (expected := find_input_shape(model)) and len(expected) == 1:
        inputs = inputs.flatten(1)
    return Batch(inputs, images.labels[spread])


def _plain(found: Inspection) -> dict[str, Any]:
    findings = [{**vars(finding), "suspicious": finding.suspicious} for finding in found.findings]
    return {
        "suspicious": found.suspicious,
        "false_positive_rate": found.false_positive_rate,
        "honest_models": found.honest_models,
        "verdict": found.verdict,
        "left_out": list(found.left_out),
        "left_out_because": dict(found.left_out),
        "unseen": list(found.unseen),
        "exposed_batches": [vars(one) for one in found.exposed],
        "findings": [{key: str(value) if value in (float("inf"),) else value for key, value in row.items()} for row in findings],
    }
