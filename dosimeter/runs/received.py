"""A client of a real federation under audit: its update is here, and its private batch only where somebody hands it over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from dosimeter.artefacts import fingerprint
from dosimeter.client.checks import check_batch, require_exposure
from dosimeter.client.observe import observe
from dosimeter.client.training import MeanOfClients, sends_one_gradient
from dosimeter.interfaces import Exposure, Public
from dosimeter.network.model_state import copy_of
from dosimeter.runs.audited_client import fingerprints_of, measure_accuracy, stand_in
from dosimeter.runs.measurement import AuditedClient
from dosimeter.surfaces.layer_inputs import drops_units
from dosimeter.types import Batch, Refused

LEAST_COSINE = 0.2  # of the update with what a client with the handed-over batch sends, whatever the order of its steps
LEAST_COSINE_OF_ONE = 0.9  # the same of one gradient, which has no order; rounding of small steps takes some of it away


def received_client(exposure: Exposure, truth: Batch | None = None, *, foreign: Batch | None = None, origin: str = "") -> AuditedClient:
    """The client that sent an update; `origin` says where the update comes from. Samples that do not explain the update are refused."""
    require_exposure(exposure)
    public = exposure.public
    dtype = next(exposure.model.parameters())
    nothing = torch.zeros(0, *public.input_shape).to(dtype) if public.blank is None else public.blank[[]]
    batch = Batch(nothing, torch.zeros(0, dtype=torch.int64, device=dtype.device))
    said = "not at hand"
    if truth is not None:
        check_batch(copy_of(exposure.model), truth, "truth", public.loss)
        if public.batch_size not in (None, len(truth.inputs)):
            raise ValueError(f"truth.inputs: expected {public.batch_size} samples, as the client declared, got {len(truth.inputs)}")
        batch, said = truth, _check_explains(exposure, truth)
    judged, where = (exposure.auxiliary, "the auxiliary data") if exposure.auxiliary is not None else (truth, "the private batch itself")
    return AuditedClient(
        model=exposure.model,
        batch=batch,
        received=exposure,
        foreign=None if truth is None else foreign or stand_in(copy_of(exposure.model), truth, exposure.auxiliary, public.normalization),
        auxiliary=exposure.auxiliary,
        normalization=public.normalization,
        description={
            "model": type(exposure.model).__name__,
            "stage": "as the server sent it",
            "data": origin or "a received update",
            "truth": said,
            "accuracy": None if judged is None else measure_accuracy(copy_of(exposure.model), judged),
            "accuracy_on": None if judged is None else where,
            **fingerprints_of(exposure.model, batch),
            "update_hash": fingerprint(*(part for name in sorted(exposure.update) for part in (name, exposure.update[name]))),
        },
    )


def protocol_of(public: Public) -> dict[str, Any]:
    """The protocol of an exposure, as a suite has it."""
    training = public.training.each if isinstance(public.training, MeanOfClients) else public.training
    return {
        "training": training,
        "loss": public.loss,
        "defenses": public.defenses,
        "declare_batch_size": public.batch_size is not None,
    }


def _check_explains(exposure: Exposure, truth: Batch) -> str:
    """How well the update of a simulated client with this batch agrees with the received one. Samples of others are refused.

    A client that shuffles, drops units or draws noise sends another update of the same samples. Behind a defense nothing is refused.
    """
    public = exposure.public
    try:
        again = observe(exposure.model, truth, **_options(public)).update
    except Refused as refusal:
        return f"given; what a client with these samples sends cannot be simulated: {refusal}"
    both = [name for name in exposure.update if name in again]
    cosine = float(torch.cosine_similarity(_flat(exposure.update, both), _flat(again, both), dim=0))
    exact = sends_one_gradient(public.training) and not drops_units(exposure.model)
    if cosine < (LEAST_COSINE_OF_ONE if exact else LEAST_COSINE) and not public.defenses:
        said = f"a client with these samples sends an update whose cosine with the received one is {cosine:.2g}"
        raise ValueError(f"truth: these are not the samples behind the update: {said}")
    return f"given; the update of a simulated client with these samples has the cosine {cosine:.2g} with the received one"


def _options(public: Public) -> dict[str, Any]:
    protocol = protocol_of(public)
    return protocol | {"normalization": public.normalization}


def _flat(update: dict[str, Tensor], names: list[str]) -> Tensor:
    return torch.cat([update[name].double().flatten() for name in names])
