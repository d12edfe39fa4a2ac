"""What is measured, on which client and under which protocol; and the key of its record."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.config import Surfaced, describe, digest
from dosimeter.interfaces import Defense, Exposure, LabelRecovery, Loss, Recovery, Tampering, Training
from dosimeter.network.token_inputs import are_tokens
from dosimeter.options import OptionError, check_fields
from dosimeter.runs.devices import device_name
from dosimeter.surfaces.surface import Surface, surface_of_method, surfaces
from dosimeter.types import Batch, Normalization
from dosimeter.version import __version__


@dataclass(frozen=True, kw_only=True)
class AuditedClient:
    """The client under audit: its model and private batch, other samples for the nulls, and facts for the records.

    A client of a real federation has sent its update already. Its private batch is empty where nobody hands it over.
    """

    model: nn.Module
    batch: Batch
    received: Exposure | None = None  # what a real client sent; None: the client is simulated
    foreign: Batch | None = None  # another client's batch, for the null
    auxiliary: Batch | None = None  # what the threat model grants the server
    reference: Batch | None = None  # images for the nulls alone, where the server is granted none
    pool: Batch | None = None  # samples of other clients, on which a defense's cost is measured by training
    held_out: Batch | None = None  # samples on which that training's accuracy is measured
    normalization: Normalization = field(default_factory=Normalization)
    description: dict[str, Any] = field(default_factory=dict)  # model, data, accuracy, fingerprints: plain JSON

    @property
    def has_truth(self) -> bool:
        """Whether the private batch is at hand, so that what is recovered can be scored."""
        return len(self.batch.inputs) > 0


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """How the client trains, and its defenses."""

    training: Training = field(default_factory=FedSGD)
    loss: Loss = field(default_factory=CrossEntropy)
    defenses: tuple[Defense, ...] = ()
    declare_batch_size: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, kw_only=True)
class Measurement(Protocol, Surfaced):
    """A protocol, the source of the labels, and the method that is scored. Without a method, the label recovery is scored.

    In a file the method stands under the key of its surface, such as `attack`.
    """

    labels: LabelRecovery | Literal["given", "optimised"] = "given"  # optimised: the method finds its own
    method: Recovery | None = None
    adaptive: bool = False  # the method takes the defenses into account

    @classmethod
    def method_types(cls) -> dict[str, Any]:
        return {surface.key: surface.methods.interface for surface in surfaces() if surface.key != "labels"}  # a field of its own

    @classmethod
    def collect_methods(cls, by_key: dict[str, Any]) -> dict[str, Any]:
        if len(by_key) > 1:
            raise OptionError(" and ".join(by_key), "expected one method, since one is scored")
        return {"method": next(iter(by_key.values()), None)}

    def by_surface(self) -> dict[str, Any]:
        return {} if self.method is None else {self.surface.key: self.method}

    @property
    def scored(self) -> Recovery:
        """The method that is scored."""
        if self.method is None and not isinstance(self.labels, LabelRecovery):
            raise ValueError(f"nothing to measure: name a method under one of {', '.join(surface.key for surface in surfaces())}")
        return self.method or self.labels  # pyright: ignore[reportReturnType]

    @property
    def tampering(self) -> Tampering | None:
        """The method that changes the model before it is sent."""
        return next((method for method in (self.method, self.labels) if isinstance(method, Tampering)), None)

    @property
    def surface(self) -> Surface[Any]:
        return surface_of_method(self.scored)


def key_of(client: AuditedClient, measurement: Measurement) -> str:
    """The key of a measurement in the records: the same for the same client, protocol, methods and options."""
    return digest(_config(client, measurement))


def identity_of(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    """The fields of a record that are known before the measurement is made."""
    config = _config(client, measurement)
    return {
        "key": digest(config),
        "config": config,
        "surface": measurement.surface.name,
        "method": measurement.scored.name,
        "seed": measurement.seed,
        "threat_model": _threat_model(client, measurement),
        "versions": versions(client),
    }


def _config(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    return {"subject": describe(client.description), **describe(measurement)}  # "subject": as in the records on disk


def facts_of(client: AuditedClient, protocol: Protocol) -> dict[str, Any]:
    """The part of the threat model that all methods of one protocol share."""
    return {
        **client.description,
        "mode": "train" if client.model.training else "eval",
        "input_shape": list(client.batch.inputs.shape[1:]),
        **({"inputs": "token ids"} if are_tokens(client.batch.inputs) else {}),
        "batch_size": client.received.public.batch_size if client.received and not client.has_truth else len(client.batch.inputs),
        "batch_size_declared": protocol.declare_batch_size,
        "training": describe(protocol.training),
        "loss": describe(protocol.loss),
        "defenses": describe(protocol.defenses),
    }


def versions(client: AuditedClient) -> dict[str, str]:
    """What a run's last bits depend on beside its seed: versions, the device, and PyTorch's threads, which change the order of sums."""
    numbers = {"dosimeter": __version__, "torch": torch.__version__, "python": platform.python_version()}
    return numbers | {
        "threads": str(torch.get_num_threads()),
        "device": device_name(next(iter(client.model.parameters()), torch.zeros(())).device),
    }


def _threat_model(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    """Everything a reader must know to weigh the scores."""
    labels = measurement.labels
    return {
        **facts_of(client, measurement),
        "labels": f"recovered by {labels.name}" if isinstance(labels, LabelRecovery) else labels,
        "auxiliary": 0 if client.auxiliary is None else len(client.auxiliary.inputs),
        "needs": sorted(need.value for need in measurement.scored.needs),
    }
