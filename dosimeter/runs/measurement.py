"""What is measured, on which client and under which protocol; and the key of its record."""

from __future__ import annotations

import platform
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import nn

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.config import describe, digest
from dosimeter.interfaces import Attack, Defense, FeatureRecovery, LabelRecovery, Loss, Method, Tampering, Training
from dosimeter.options import check_fields
from dosimeter.types import Batch, Normalization
from dosimeter.version import __version__


@dataclass(frozen=True, kw_only=True)
class AuditedClient:
    """The client under audit: its model and private batch, other samples for the nulls, and facts for the records."""

    model: nn.Module
    batch: Batch
    foreign: Batch | None = None  # another client's batch, for the null
    auxiliary: Batch | None = None  # what the threat model grants the server
    reference: Batch | None = None  # images for the nulls alone, where the server is granted none
    pool: Batch | None = None  # samples of other clients, on which a defense's cost is measured by training
    held_out: Batch | None = None  # samples on which that training's accuracy is measured
    normalization: Normalization = field(default_factory=Normalization)
    description: dict[str, Any] = field(default_factory=dict)  # model, data, accuracy, fingerprints: plain JSON


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
class Measurement(Protocol):
    """A protocol and the methods that the server runs. The last method set is scored; the others supply its inputs."""

    labels: LabelRecovery | Literal["given", "optimised"] = "given"  # optimised: the method finds its own
    features: FeatureRecovery | None = None
    attack: Attack | None = None
    adaptive: bool = False  # the attack takes the defenses into account

    @property
    def method(self) -> Method | None:
        """The method that is scored."""
        return self.attack or self.features or (self.labels if isinstance(self.labels, LabelRecovery) else None)

    @property
    def tampering(self) -> Tampering | None:
        """The method that changes the model before it is sent."""
        return next((method for method in (self.attack, self.labels) if isinstance(method, Tampering)), None)

    @property
    def surface(self) -> str:
        return "inputs" if self.attack else "features" if self.features else "labels"


def key_of(client: AuditedClient, measurement: Measurement) -> str:
    """The key of a measurement in the records: the same for the same client, protocol, methods and options."""
    return digest(_config(client, measurement))


def identity_of(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    """The fields of a record that are known before the measurement is made."""
    method = measurement.method
    assert method is not None
    config = _config(client, measurement)
    return {
        "key": digest(config),
        "config": config,
        "surface": measurement.surface,
        "method": method.name,
        "seed": measurement.seed,
        "threat_model": _threat_model(client, measurement),
        "versions": versions(),
    }


def _config(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    return {"subject": describe(client.description), **describe(measurement)}  # "subject": as in the records on disk


def facts_of(client: AuditedClient, protocol: Protocol) -> dict[str, Any]:
    """The part of the threat model that all methods of one protocol share."""
    return {
        **client.description,
        "mode": "train" if client.model.training else "eval",
        "input_shape": list(client.batch.inputs.shape[1:]),
        "batch_size": len(client.batch.inputs),
        "batch_size_declared": protocol.declare_batch_size,
        "training": describe(protocol.training),
        "loss": describe(protocol.loss),
        "defenses": describe(protocol.defenses),
    }


def versions() -> dict[str, str]:
    """What a run's last bits depend on beside its seed: versions, and PyTorch's threads, whose number changes the order of sums."""
    threads = str(torch.get_num_threads())
    return {"dosimeter": __version__, "torch": torch.__version__, "python": platform.python_version(), "threads": threads}


def _threat_model(client: AuditedClient, measurement: Measurement) -> dict[str, Any]:
    """Everything a reader must know to weigh the scores."""
    method, labels = measurement.method, measurement.labels
    assert method is not None
    return {
        **facts_of(client, measurement),
        "labels": f"recovered by {labels.name}" if isinstance(labels, LabelRecovery) else labels,
        "auxiliary": 0 if client.auxiliary is None else len(client.auxiliary.inputs),
        "needs": sorted(need.value for need in method.needs),
    }
