"""The client under audit, built from a configuration or from the caller's own objects."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dosimeter.artefacts import fingerprint
from dosimeter.client.checks import check_batch, check_model, check_normalization, class_axis
from dosimeter.client.observe import loss_for
from dosimeter.data.dataset import ImageSet
from dosimeter.data.load import load_images
from dosimeter.data.samplers import Random
from dosimeter.interfaces import Sampler
from dosimeter.models.loading import ModelConfig, load_model
from dosimeter.network.copies import deep_copy
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import OUTPUTS, evaluation_mode, output_of, samples_at_once
from dosimeter.network.token_inputs import are_tokens, tensors_of
from dosimeter.normalization import from_pixels
from dosimeter.options import NonNegativeInt, OptionError, PositiveInt, check_fields
from dosimeter.progress import advance
from dosimeter.randomness import generator
from dosimeter.registry import MODELS, options_of
from dosimeter.runs.devices import choose_device
from dosimeter.runs.foreign import other_samples
from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.surfaces.labels import has_one_label
from dosimeter.surfaces.several_labels import are_vectors
from dosimeter.types import Batch, Normalization

HELD_OUT_SHARE = 0.2  # of the images that are not private: the accuracy is measured on them, nothing is trained on them
MOST_ACCURACY_IMAGES = 512  # that the accuracy is measured on
MOST_POOL_IMAGES = 4096  # of other clients that a utility run trains on


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which images, how the private batch is drawn, and what the server is granted. Other keys are options of the data set."""

    name: str = "photographs"
    part: Literal["train", "test", "all"] = "all"
    size: PositiveInt | None = None
    batch_size: PositiveInt = 4
    sampler: Sampler = field(default_factory=Random)
    auxiliary: NonNegativeInt = 64
    normalization: Normalization | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("part", "size"):
            if name in self.options:
                raise OptionError(f"options.{name}", f"belongs beside the name, as data.{name}")


@dataclass(frozen=True, kw_only=True)
class Experiment(Measurement):
    """One experiment as a TOML file describes it: a measurement, a model and data."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    device: str = "auto"

    def measurement(self) -> Measurement:
        return Measurement(**{name: getattr(self, name) for name in Measurement.__dataclass_fields__})


def prepare(model_config: ModelConfig, data_config: DataConfig, *, seed: int = 0, device: str = "auto") -> AuditedClient:
    """The client that a configuration names. Every random draw depends on `seed` alone."""
    place = choose_device(device)
    images = load_images(data_config.name, part=data_config.part, size=data_config.size, **data_config.options)
    private, foreign, rest = _draw(images, data_config, seed)
    count = max(1, round(HELD_OUT_SHARE * len(rest)))
    held_out, public = rest[:count], rest[count:]
    normalization = data_config.normalization or Normalization()
    check_normalization(normalization, images.images.shape[1])

    model = build_model(model_config, images).to(place)
    like = next((parameter for parameter in model.parameters()), torch.zeros((), device=place))

    def batch(indices: Tensor) -> Batch:
        return Batch(from_pixels(images.images[indices], normalization).to(like), images.labels[indices].to(place))

    private_batch = batch(private)
    check_batch(deep_copy(model), private_batch, "data")  # a model may keep what it sees
    if model_config.epochs:
        train_model(model, batch(public), model_config.epochs, seed)
    model.train(model_config.mode == "train")
    accuracy = measure_accuracy(model, batch(held_out[:MOST_ACCURACY_IMAGES])) if len(held_out) else None
    granted = batch(public[: data_config.auxiliary]) if data_config.auxiliary and len(public) else None
    return AuditedClient(
        model=model,
        batch=private_batch,
        foreign=batch(foreign) if len(foreign) else stand_in(model, private_batch, None, normalization),
        auxiliary=granted,
        reference=batch(public[:MOST_ACCURACY_IMAGES]) if granted is None and len(public) else None,
        pool=batch(public[:MOST_POOL_IMAGES]) if len(public) else None,
        held_out=batch(held_out[:MOST_ACCURACY_IMAGES]) if len(held_out) else None,
        normalization=normalization,
        description={
            "model": model_config.name,
            "stage": _stage(model_config),
            "data": images.name,
            "accuracy": accuracy,
            "accuracy_on": f"{min(len(held_out), MOST_ACCURACY_IMAGES)} held-out images",
            **fingerprints_of(model, private_batch),
        },
    )


def client_from(
    model: nn.Module,
    batch: Batch,
    *,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    foreign: Batch | None = None,
    loss: Any = None,
) -> AuditedClient:
    """The client made of the caller's own model and batches."""
    normalization = normalization or Normalization()
    check_model(model)
    judged, where = (auxiliary, "the auxiliary data") if auxiliary is not None else (batch, "the private batch itself")
    with nothing_kept(model):
        trial = copy_of(model)  # a model may keep what it sees
        loss = loss_for(trial, batch, loss)
        for path, samples in (("batch", batch), ("auxiliary", auxiliary), ("foreign", foreign)):
            if samples is not None:
                check_batch(trial, samples, path, loss)
        accuracy = None if getattr(trial, OUTPUTS, None) else measure_accuracy(trial, judged)  # several outputs have no one answer
    return AuditedClient(
        model=model,
        batch=batch,
        foreign=foreign or stand_in(trial, batch, auxiliary, normalization),
        auxiliary=auxiliary,
        normalization=normalization,
        description={
            "model": type(model).__name__,
            "stage": "as handed over",
            "data": "your own batch",
            "accuracy": accuracy,
            "accuracy_on": where,
            **fingerprints_of(model, batch),
        },
    )


def stand_in(model: nn.Module, batch: Batch, auxiliary: Batch | None, normalization: Normalization) -> Batch:
    """A foreign batch where the caller gives none: auxiliary samples, or drawn ones with the labels shifted by one sample."""
    size = len(batch.inputs)
    if auxiliary is not None and len(auxiliary.inputs) >= size:
        return Batch(auxiliary.inputs[-size:], auxiliary.targets[-size:])
    samples = other_samples(model, batch, None, normalization, generator(0, "foreign samples"))
    return Batch(samples, batch.targets.roll(1, 0))


def fingerprints_of(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """The number of parameters, and hashes that identify the model and the batch in the records."""
    return {
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "model_hash": fingerprint(*model.state_dict().values()),
        "batch_hash": fingerprint(*tensors_of(batch.inputs), batch.targets),
    }


def measure_accuracy(model: nn.Module, batch: Batch) -> float | None:
    """The share of samples, or of positions of texts, classified correctly in eval mode, of several labels all; None without classes.

    The model's own mode is restored.
    """
    with evaluation_mode(model):
        order = torch.arange(len(batch.inputs), device=batch.inputs.device)
        pieces = order.split(min(64, samples_at_once(model, batch.inputs)))
        predicted = torch.cat([output_of(model, batch.inputs[piece]) for piece in pieces])
    if batch.targets.is_floating_point() and (batch.targets.shape != predicted.shape or not _are_labels(batch.targets)):
        return None  # numbers
    predicted = predicted[:, None] if predicted.ndim == 1 else predicted
    if predicted.ndim > 2 and batch.targets.is_floating_point():
        return None
    if predicted.ndim > 2:  # one class at each place or position
        classes = predicted.argmax(class_axis(tuple(predicted.shape), are_tokens(batch.inputs), batch.targets))
        if classes.shape != batch.targets.shape:
            return None  # targets of no such place, which the loss refuses
        counted, right = batch.targets >= 0, classes == batch.targets
        return float(right[counted].float().mean())
    if batch.targets.is_floating_point() and batch.targets.ndim == 1:
        return None
    if not batch.targets.is_floating_point() and batch.targets.ndim > 1:
        return None  # what a loss of the client's own makes of them
    if not has_one_label(batch.targets):
        return float(((predicted > 0) == (batch.targets > 0.5)).all(1).float().mean())
    targets = batch.targets if batch.targets.ndim == 1 else batch.targets.argmax(1)
    if predicted.shape[1] == 1:
        return float(((predicted[:, 0] > 0) == (targets > 0)).float().mean())
    return float((predicted.argmax(1) == targets).float().mean())


def _are_labels(targets: Tensor) -> bool:
    """Whether float targets are label vectors or soft labels, not numbers of a regression."""
    return targets.ndim == 2 and targets.shape[1] > 1 and ((has_one_label(targets) and bool((targets >= 0).all())) or are_vectors(targets))


def _draw(images: ImageSet, config: DataConfig, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Disjoint indices: the private batch, a foreign batch from the same sampler, and all other images in random order."""
    classes, everything = len(images.class_names), torch.arange(len(images))
    private = config.sampler(images.labels, config.batch_size, classes, generator(seed, "private batch"))
    others = everything[~torch.isin(everything, private)]
    try:
        foreign = others[config.sampler(images.labels[others], config.batch_size, classes, generator(seed, "foreign batch"))]
    except ValueError:  # too few images are left for the sampler
        foreign = others[: config.batch_size] if len(others) >= config.batch_size else others[:0]
    rest = others[~torch.isin(others, foreign)]
    return private, foreign, rest[torch.randperm(len(rest), generator=generator(seed, "auxiliary images"))]


def build_model(config: ModelConfig, images: ImageSet) -> nn.Module:
    """The model of a configuration. Its builder gets classes, channels and size from the images where it takes them."""
    options = dict(config.options)
    if ":" not in config.name:
        inferred = {"classes": len(images.class_names), "channels": images.images.shape[1], "size": images.images.shape[-1]}
        known = {option.name for option in options_of(MODELS.entry(config.name, "model"))}
        options = {name: value for name, value in inferred.items() if name in known} | options
    return load_model(config.name, options, Path(config.weights) if config.weights else None, config.seed)


def train_model(model: nn.Module, data: Batch, epochs: int, seed: int) -> None:
    """Train by Adam on images that are not private, so that an audit can study a trained model."""
    rng = generator(seed, "training order")
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model.train()
    for epoch in range(epochs):
        for chosen in torch.randperm(len(data.inputs), generator=rng).split(32):
            if len(chosen) == 1 and len(data.inputs) > 1:
                continue  # batch norm cannot train on one sample
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen]).backward()
            optimizer.step()
        advance(epoch + 1, epochs, "training the model")


def _stage(config: ModelConfig) -> str:
    origin = f"weights from {Path(config.weights).name}" if config.weights else "untrained"
    return f"{origin}, then {config.epochs} epochs here" if config.epochs else origin
