"""What the server gets from a batch; measurements that differ in their method alone share one exposure."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from torch import nn

from dosimeter.artefacts import fingerprint
from dosimeter.client.observe import observe
from dosimeter.config import describe, digest
from dosimeter.interfaces import Exposure
from dosimeter.network.model_state import state_of
from dosimeter.runs.measurement import AuditedClient, Measurement, Protocol
from dosimeter.types import Batch, Refused

Expose = Callable[[AuditedClient, Protocol, Batch], Exposure]
MOST_KEPT = 4  # exposures; each holds a copy of the model and an update


def expose(client: AuditedClient, protocol: Protocol, batch: Batch) -> Exposure:
    """What the server gets from a batch under this protocol. An active attack changes the model first.

    Of a real client's own batch, the server has what it received, and nobody simulates it.
    """
    if client.received is not None and batch is client.batch:
        if isinstance(protocol, Measurement) and protocol.tampering is not None:
            raise Refused("a received update cannot be attacked by changing the model: it was sent before")
        return client.received
    return observe(
        _model_to_send(client, protocol),
        batch,
        training=protocol.training,
        defenses=protocol.defenses,
        loss=protocol.loss,
        normalization=client.normalization,
        auxiliary=client.auxiliary,
        declare_batch_size=protocol.declare_batch_size,
        seed=protocol.seed,
    )


def _model_to_send(client: AuditedClient, protocol: Protocol) -> nn.Module:
    """The model that the server sends. A dishonest server changes it and knows the shape and scale of the inputs."""
    method = protocol.tampering if isinstance(protocol, Measurement) else None
    if method is None:
        return client.model
    known = {"input_shape": tuple(client.batch.inputs.shape[1:]), "normalization": client.normalization}
    options = (option.name for option in fields(method))  # pyright: ignore[reportArgumentType]
    unsaid = {name: known[name] for name in options if name in known and getattr(method, name) is None}
    return replace(method, **unsaid).tamper(client.model)  # pyright: ignore[reportArgumentType]


@dataclass(frozen=True, kw_only=True)
class _Kept:
    client: AuditedClient  # held, so that no other client or batch takes over its id
    batch: Batch
    exposure: Exposure
    state: list[object]  # of the exposure when it was made
    said: list[warnings.WarningMessage]


class Exposures:
    """Calls `expose` once for each protocol and tampering, on a client's private batch and on its foreign batch.

    An exposure that a method changed is made anew. Warnings come with every call, so that every record has them.
    """

    def __init__(self) -> None:
        self._kept: dict[tuple[str, int, int], _Kept] = {}

    def __call__(self, client: AuditedClient, protocol: Protocol, batch: Batch) -> Exposure:
        if batch is not client.batch and batch is not client.foreign:
            return expose(client, protocol, batch)
        key = (_digest(protocol), id(client.model), id(batch))
        kept = self._kept.pop(key, None)
        if kept is None or _state(kept.exposure) != kept.state:
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                exposure = expose(client, protocol, batch)
            kept = _Kept(client=client, batch=batch, exposure=exposure, state=_state(exposure), said=said)
        self._kept[key] = kept  # the latest stands last
        while len(self._kept) > MOST_KEPT:
            del self._kept[next(iter(self._kept))]
        for warning in kept.said:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return kept.exposure


def _digest(protocol: Protocol) -> str:
    setting = {name: describe(getattr(protocol, name)) for name in Protocol.__dataclass_fields__}
    return digest({"setting": setting, "tampering": describe(protocol.tampering) if isinstance(protocol, Measurement) else None})


def _state(exposure: Exposure) -> list[object]:
    """What a method could change of an exposure: the model's modules and settings, and the values of all tensors."""
    model, update = exposure.model, exposure.update
    return [*state_of(model)[0], *update, fingerprint(*model.parameters(), *model.buffers(), *update.values())]
