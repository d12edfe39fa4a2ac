"""An audit of an update that a federation sent, from files: a capture, or the weights before and after."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.captures.capture import Capture, Facts, hash_of
from dosimeter.captures.store import captures_in, read_capture, read_model
from dosimeter.client.kinds import Kind
from dosimeter.config import construct
from dosimeter.data.load import load_images
from dosimeter.models.loading import ModelConfig, fill, load_model, read_state
from dosimeter.normalization import from_pixels
from dosimeter.options import PositiveInt
from dosimeter.randomness import generator
from dosimeter.registry import MODELS, options_of
from dosimeter.runs.audit import Audit, Suite, run_suite
from dosimeter.runs.audited_client import DataConfig
from dosimeter.runs.devices import check_device
from dosimeter.runs.dose import dose
from dosimeter.runs.dp_guarantee import with_guarantee
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.received import protocol_of, received_client
from dosimeter.types import Batch, Normalization

PROTOCOL = ("training", "loss", "defenses")  # facts of a capture that a suite has under the same names
SAID = (*PROTOCOL, "batch_size", "input_shape", "normalization", "privacy")  # facts that words may override


@dataclass(frozen=True, kw_only=True)
class ReceivedConfig(Suite):
    """An audit of a received update as a file and words describe it. What is absent is as the capture says."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig | None = None  # whose images the server is granted
    kind: Kind | None = None
    batch_size: PositiveInt | None = None
    input_shape: tuple[PositiveInt, ...] | None = None
    normalization: Normalization | None = None
    device: str = "cpu"


def prepare_received(
    words: Mapping[str, Any], *, capture: str | None = None, before: str | None = None, after: str | None = None, truth: str | None = None
) -> tuple[AuditedClient, Suite]:
    """The client that sent an update, and the audit of it.

    `words` are the configuration as plain data. The update is a `capture`, or the weights file `after` training. The model that was
    sent is `before`, or lies beside the capture, or is `model.weights`. `truth` names the private images.
    """
    if (capture is None) == (after is None):
        raise ValueError("expected a capture, or the weights before and after; pass --capture FILE, or --before FILE --after FILE")
    config = construct(ReceivedConfig, dict(words))
    check_device(config.device)
    sent = Capture(update=read_state(str(after)), kind="weights") if capture is None else read_capture(capture)
    facts = _facts(config, words, sent.facts)
    state, path = _model_state(config, sent, capture, before)
    model = _build(config.model, state, path)
    model.train(_was_training(config, words, sent, state)).to(config.device)
    grants = None if config.data is None else _images(config.data, facts, config.seed)
    exposure = replace(sent, kind=facts.kind, mode=None).receive(model, auxiliary=grants, **_declared(facts))
    private = None if truth is None else _all_images(truth, exposure.public.input_shape, exposure.public.normalization)
    origin = f"round {sent.round}, client {sent.client or 'unknown'}" if sent.round is not None else Path(str(capture or after)).name
    client = received_client(exposure, private, origin=f"an update of {origin}")
    told = {"round": sent.round, "client": sent.client, "framework": sent.framework}
    named = client.description | {"model": config.model.name} | {name: value for name, value in told.items() if value not in (None, "")}
    chosen = {name: getattr(config, name) for name in ("methods", "attack_labels", "budget", "adaptive", "rounds", "seed")}
    return replace(client, description=named), Suite(**protocol_of(exposure.public), **chosen, privacy=facts.privacy)


def audit_received(
    words: Mapping[str, Any],
    *,
    capture: str | None = None,
    before: str | None = None,
    after: str | None = None,
    truth: str | None = None,
    **options: Any,
) -> Audit:
    """Audit a received update, or all captures of a folder with the dose that the rounds of each client add up to.

    `options` are those of `run_suite`. In a folder every capture has its model beside it, and `truth` is behind all of them.
    """
    if capture is None or not Path(capture).is_dir():
        client, suite = prepare_received(words, capture=capture, before=before, after=after, truth=truth)
        return run_suite(client, suite, **options)
    if before is not None or after is not None:
        raise ValueError("--capture: expected a folder of captures alone; each has its model beside it")
    prepared = [prepare_received(words, capture=str(path), truth=truth) for path in captures_in(capture)]
    if not prepared:
        raise ValueError(f"{capture}: no captures there; `dm.write_capture` writes them")
    clients = _with_guarantees(_with_doses([client for client, _ in prepared]), [suite for _, suite in prepared])
    audits = [run_suite(client, suite, beside=clients, **options) for client, (_, suite) in zip(clients, prepared)]
    records = {record.key: record for one in audits for record in one.records}
    return Audit(records=tuple(records.values()), resumed=sum(one.resumed for one in audits))


def _with_doses(clients: Sequence[AuditedClient]) -> list[AuditedClient]:
    """The clients, in the order of their rounds, with what their rounds add up to."""
    by_name: dict[str, list[AuditedClient]] = {}
    for client in sorted(clients, key=lambda one: one.description.get("round", 0)):
        by_name.setdefault(str(client.description.get("client", "")), []).append(client)
    told: dict[int, AuditedClient] = {}
    for rounds in by_name.values():
        for client, found in zip(rounds, dose([one.received for one in rounds if one.received is not None])):
            known = {name: value for name, value in vars(found).items() if value is not None}
            told[id(client)] = replace(client, description=client.description | {"data": "updates of a federation"} | known)
    return [told[id(client)] for client in clients]


def _with_guarantees(clients: Sequence[AuditedClient], suites: Sequence[Suite]) -> list[AuditedClient]:
    """The clients, each with the ε of its privacy setting after all of its rounds so far."""
    told, counted = [], Counter[str]()
    for client, suite in zip(clients, suites):
        name = str(client.description.get("client", ""))
        counted[name] += 1
        told.append(with_guarantee(client, suite.privacy, max(suite.rounds, counted[name])))
    return told


def _facts(config: ReceivedConfig, words: Mapping[str, Any], said: Facts) -> Facts:
    """The capture's facts, overridden by what the words name."""
    named = {name: getattr(config, name) for name in ("kind", *SAID) if name in words}
    return replace(said, **named)


def _declared(facts: Facts) -> dict[str, Any]:
    return {name: getattr(facts, name) for name in SAID}


def _model_state(config: ReceivedConfig, sent: Capture, capture: str | None, before: str | None) -> tuple[dict[str, Tensor], str]:
    """The weights that the server sent, and where they were found."""
    if before is not None:
        state, path = read_state(before), before
    elif capture is not None and (beside := read_model(capture, sent)) is not None:
        return beside, capture
    elif config.model.weights is not None:
        state, path = read_state(config.model.weights), config.model.weights
    else:
        raise ValueError("the weights that the server sent are missing; pass --before FILE, or lay the captured model beside the capture")
    if sent.before and hash_of(state) != sent.before:
        raise ValueError(f"{path}: is not the model that was sent; the capture names one with the hash {sent.before[:16]}…")
    return state, path


def _build(config: ModelConfig, state: dict[str, Tensor], path: str) -> nn.Module:
    """The model with the weights that were sent. Classes and channels follow from the weights where nobody says them."""
    options = dict(config.options)
    if ":" not in config.name:
        known = {option.name for option in options_of(MODELS.entry(config.name, "model"))}
        matrices = [tensor for tensor in state.values() if tensor.ndim == 2]
        filters = [tensor for tensor in state.values() if tensor.ndim == 4]
        inferred = {"classes": len(matrices[-1])} if matrices else {}
        inferred |= {"channels": filters[0].shape[1]} if filters else {}
        options = {name: value for name, value in inferred.items() if name in known} | options
    model = load_model(config.name, options, None, config.seed)
    fill(model, state, path)
    return model


def _was_training(config: ReceivedConfig, words: Mapping[str, Any], sent: Capture, state: Mapping[str, Tensor]) -> bool:
    """The client's mode: as the words or the capture say, else in train mode where batch norm counted batches."""
    model = words.get("model")
    if isinstance(model, Mapping) and "mode" in model:
        return config.model.mode == "train"
    if sent.mode is not None:
        return sent.mode == "train"
    counters = [name for name in sent.update if name.endswith("num_batches_tracked") and name in state]
    moved = (sent.update[name] - (0 if sent.kind == "difference" else state[name]) for name in counters)
    return any(int(batches) > 0 for batches in moved)


def _images(config: DataConfig, facts: Facts, seed: int) -> Batch | None:
    """Images that the server is granted."""
    images = load_images(config.name, part=config.part, size=config.size, **config.options)
    if not config.auxiliary:
        return None
    chosen = torch.randperm(len(images), generator=generator(seed, "auxiliary images"))[: config.auxiliary]
    scale = facts.normalization or config.normalization or Normalization()
    return Batch(from_pixels(images.images[chosen], scale), images.labels[chosen])


def _all_images(name: str, shape: tuple[int, ...], normalization: Normalization) -> Batch:
    images = load_images(name, size=shape[-1] if len(shape) == 3 else None)
    inputs = from_pixels(images.images, normalization)
    return Batch(inputs.reshape(len(inputs), *shape) if inputs[0].numel() == torch.Size(shape).numel() else inputs, images.labels)
