"""`dosimeter generator train`: from an audit's configuration to the decoder that its attacks draw with."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from dosimeter.config import construct
from dosimeter.engines.decoder.cache import StoredDecoder, train_or_load
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.models.loading import ModelConfig
from dosimeter.normalization import to_pixels
from dosimeter.options import check_fields
from dosimeter.runs.audit import AuditConfig
from dosimeter.runs.audited_client import DataConfig, Experiment, prepare
from dosimeter.runs.measurement import AuditedClient


@dataclass(frozen=True, kw_only=True)
class GeneratorConfig:
    """The model whose features the decoder turns into images, the auxiliary images it learns from, and its settings."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    decoder: DecoderSettings = field(default_factory=DecoderSettings)
    device: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


def train_from(description: dict[str, Any], out: str | None) -> dict[str, Any]:
    """Train the decoder for the model and the auxiliary images of an audit's configuration, unless the cache holds it.

    Other keys of an audit's or an experiment's file are ignored. `seconds` is the duration of the training, now or when it was
    cached.
    """
    own = {item.name for item in fields(GeneratorConfig)}
    aside = {key for kind in (AuditConfig, Experiment) for key in (*(item.name for item in fields(kind)), *kind.method_types())} - own
    config = construct(GeneratorConfig, {key: value for key, value in description.items() if key not in aside})
    client = prepare(config.model, config.data, seed=config.seed, device=config.device)
    if client.auxiliary is None:
        raise ValueError("data.auxiliary: expected at least one image that the server is granted, which the decoder learns from")
    target, found = train_decoder_of(client, config.decoder, None if out is None else Path(out))
    facts = {name: json.loads(found.facts[name]) for name in ("images", "error", "seconds")}
    words = {name: found.facts[name] for name in ("mode", "notes")}
    return {"path": str(found.path), "origin": found.origin, "feature_shape": list(target.feature_shape)} | facts | words


def train_decoder_of(client: AuditedClient, settings: DecoderSettings, path: Path | None) -> tuple[Target, StoredDecoder]:
    """The decoder for a client's model, trained on the auxiliary images unless `path` holds it already."""
    assert client.auxiliary is not None
    target = Target.from_model(client.model, tuple(client.batch.inputs.shape[1:]), client.normalization)
    pixels = to_pixels(client.auxiliary.inputs, client.normalization).clamp(0, 1)
    return target, train_or_load(target, pixels, settings, path)
