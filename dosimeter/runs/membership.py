"""Is a known sample in the client's batch? The server's test of candidates that it holds itself, and the candidates of an audit."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dosimeter.client.checks import check_batch, check_exposure, check_samples, require_exposure
from dosimeter.engines.membership.estimate import MembershipEstimate
from dosimeter.interfaces import Exposure, MembershipTest
from dosimeter.network.model_state import copy_of
from dosimeter.network.token_inputs import tensors_of
from dosimeter.randomness import generator, secret_of
from dosimeter.registry import MEMBERSHIP
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.server import run_method
from dosimeter.runs.timing import QUICK_SECONDS, seconds_a_step
from dosimeter.types import Batch, NamedInputs, Refused

MOST_OTHERS = 1000  # samples outside the batch that an audit tests: the least number that shows a false-alarm rate of 0.1 %
FEWEST_OTHERS = 16  # however long they take


def test_membership(
    exposure: Exposure,
    candidates: Batch,
    method: str | MembershipTest | None = None,  # noqa: PT028
    *,
    seed: int = 0,  # noqa: PT028
    **options: Any,
) -> MembershipEstimate:
    """Test which candidates, samples with labels that the server holds itself, are in the client's batch.

    Without noise, the gradient of a linear layer, a convolution or the head decides it exactly where it has more room than the batch has
    samples (`spans`). Behind noise, candidates are scored by a likelihood, and nothing is proved. `method` names another test.
    """
    require_exposure(exposure)
    check_samples(candidates, "candidates")
    wanted = next(exposure.model.parameters()).dtype
    if wanted != torch.float64 and any(tensor.dtype == torch.float64 for tensor in tensors_of(candidates.inputs)):
        raise TypeError(f"candidates.inputs: expected {wanted}, as the model has, got {torch.float64}")
    check_exposure(exposure)
    check_batch(copy_of(exposure.model), candidates, "candidates", exposure.public.loss)
    noisy = any(defense.noise_floor(change, 1) > 0 for defense in exposure.public.defenses for change in exposure.update.values())
    recovery = MEMBERSHIP.resolve(method or ("likelihood" if noisy else "spans"), **options)
    return run_method(replace(exposure, candidates=candidates), recovery, None, seed)


setattr(test_membership, "__test__", False)  # noqa: B010  for pytest, which collects functions of this name


def with_candidates(client: AuditedClient, exposure: Exposure, seed: int) -> Exposure:
    """The exposure to a server that also holds the client's samples, among others, and does not know which is which.

    The others are samples that the client does not hold. The order is drawn from the client's secret.
    """
    if not client.has_truth:
        raise Refused("membership in a received update: the private samples are not at hand; dm.test_membership tests candidates of yours")
    others = _others(client, exposure)
    private = _distinct(client.batch)
    joined = _join(private, others)
    secret = secret_of(*tensors_of(client.batch.inputs), client.batch.targets)
    order = torch.randperm(len(joined.inputs), generator=generator(seed, "order of candidates", secret=secret))
    return replace(exposure, candidates=_part(joined, order))


def _others(client: AuditedClient, exposure: Exposure) -> Batch:
    """Known samples that are neither in the private batch nor in the foreign one, as many as there is time for."""
    known = [one for one in (client.auxiliary, client.reference, client.pool) if one is not None]
    taken = set(_names(client.batch)) | (set() if client.foreign is None else set(_names(client.foreign)))
    found, parts = 0, []
    each = seconds_a_step(exposure) / max(1, exposure.public.batch_size or len(client.batch.inputs))
    most = max(FEWEST_OTHERS, min(MOST_OTHERS, int(QUICK_SECONDS / each))) if each > 0 else MOST_OTHERS
    for batch in known:
        kept = []
        for place, name in enumerate(_names(batch)):
            if name not in taken and found < most:
                taken.add(name)
                kept.append(place)
                found += 1
        parts += [_part(batch, torch.tensor(kept))] if kept else []
    if not parts:
        raise Refused(
            "membership needs samples that the client does not hold, whose share of false alarms is counted: pass auxiliary=dm.Batch(...), "
            "or data.auxiliary in a file"
        )
    together = parts[0]
    for part in parts[1:]:
        together = _join(together, part)
    return together


def _join(first: Batch, second: Batch) -> Batch:
    """Both batches, the first one first."""
    mine, theirs = first.targets, second.targets
    if mine.shape[1:] != theirs.shape[1:] or mine.is_floating_point() != theirs.is_floating_point():
        raise Refused("membership needs auxiliary samples with targets like those of the private ones")
    if [tensor.shape[1:] for tensor in tensors_of(first.inputs)] != [tensor.shape[1:] for tensor in tensors_of(second.inputs)]:
        raise Refused("membership needs auxiliary samples of the private ones' shape")
    targets = torch.cat((mine, theirs.to(mine)))
    if isinstance(first.inputs, NamedInputs):
        tensors = {name: torch.cat((one, second.inputs.tensors[name].to(one))) for name, one in first.inputs.tensors.items()}
        return Batch(NamedInputs(tensors), targets)
    return Batch(torch.cat((first.inputs, second.inputs.to(first.inputs))), targets)


def _distinct(batch: Batch) -> Batch:
    places = {name: place for place, name in reversed(list(enumerate(_names(batch))))}
    return _part(batch, torch.tensor(sorted(places.values())))


def _part(batch: Batch, chosen: Tensor) -> Batch:
    chosen = chosen.to(batch.targets.device)
    return Batch(batch.inputs[chosen], batch.targets[chosen])


def _names(batch: Batch) -> list[tuple[bytes, ...]]:
    """A name of each sample: a hash of its tensors."""
    columns = [tensor.detach().cpu().flatten(1) for tensor in tensors_of(batch.inputs)]
    return [
        tuple(hashlib.blake2b(column[place].double().numpy().tobytes()).digest() for column in columns)
        for place in range(len(batch.targets))
    ]
