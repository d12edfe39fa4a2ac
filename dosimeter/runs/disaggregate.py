"""Several rounds behind secure aggregation taken apart: each client's own update, if it is about the same in every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from dosimeter.client.training import MeanOfClients
from dosimeter.engines.disaggregation import find_participation, independent_updates
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.options import mismatch
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused, Update

WHOLE_SIZE = 0.05  # of a sample: how far a client's number of samples may be from a whole number


@dataclass(frozen=True, kw_only=True)
class Disaggregation:
    """Who took part when, and what each client sent."""

    participation: Tensor  # (rounds, clients) bool
    unique: Tensor  # (clients,) bool: no other rounds fit this client's counts
    misfit: float  # of the rounds' sums that the clients' updates leave unexplained, relative: 0 where no update changed over the rounds
    exposures: tuple[Exposure, ...]  # of each client, as if it had sent its update alone


def disaggregate(
    rounds: Sequence[Exposure], counts: Sequence[Sequence[int]] | Tensor, interval: int, seconds: float = 120.0
) -> Disaggregation:
    """Split the means of several rounds into the clients' own updates.

    Lam et al., "Gradient Disaggregation: Breaking Privacy in Federated Learning by Reconstructing the User Participant Matrix", ICML 2021
    (thesis Eq. 2.3). `counts` (intervals, clients) says how often each client took part in each run of `interval` rounds, as device
    analytics tell a server. The premise is that a client's update is about the same in all of these rounds: the model stands still, or
    moves little. Departures: their 0/1 programs are solved by HiGHS, after a try by linear equations alone. A second program looks for
    other rounds that fit as well; `unique` says where there are none. The clients' numbers of samples follow from those of the rounds.
    Nothing is proved of an update that was split off: it is declared as `unmodelled`.
    """
    training = [_training_of(one, number) for number, one in enumerate(rounds)]
    counted = _checked_counts(counts, interval, training)
    clients = counted.shape[1]
    if len(rounds) <= clients:
        raise Refused(f"disaggregation needs more rounds than clients: {clients} clients, and {len(rounds)} rounds")
    names = list(rounds[0].update)
    if any(list(one.update) != names for one in rounds):
        raise ValueError("rounds: expected the same layers in every round")
    sizes = torch.tensor([float(one.public.batch_size or 0) for one in rounds], dtype=torch.float64)
    sums = torch.stack([torch.cat([one.update[name].double().flatten().cpu() for name in names]) for one in rounds]) * sizes[:, None]
    shown = independent_updates(sums)
    if shown < clients:
        raise Refused(f"the {len(rounds)} rounds show {shown} independent updates of {clients} clients: more rounds, or others, are needed")
    found = find_participation(sums, counted, interval, seconds)
    if found is None:
        raise Refused(f"no participation that fits the counts was found within {seconds:g} s: the updates differ too much between rounds")
    matrix = found.matrix.double()
    own = linear_fit(matrix, sums)  # (K, D): a client's samples times its update
    samples = linear_fit(matrix, sizes[:, None]).flatten()  # (K,)
    left = float((matrix @ own - sums).norm() / sums.norm())
    each = tuple(_alone(rounds[0], training[0], row / number, number) for row, number in zip(own, samples, strict=True))
    return Disaggregation(participation=found.matrix, unique=found.unique, misfit=left, exposures=each)


def _training_of(one: Exposure, number: int) -> MeanOfClients:
    public = one.public
    if not isinstance(public.training, MeanOfClients):
        raise Refused(f"rounds[{number}] is a single client's update: there is nothing to take apart")
    if public.batch_size is None:
        raise Refused(f"rounds[{number}]: its number of samples is not declared, so that its mean cannot be made a sum")
    if any(defense.side == "update" and defense.scaling() != "none" for defense in public.defenses):
        raise Refused(f"rounds[{number}]: a defense multiplied the mean by an unknown factor, so that the rounds do not add up")
    return public.training


def _checked_counts(counts: Sequence[Sequence[int]] | Tensor, interval: int, training: Sequence[MeanOfClients]) -> Tensor:
    table = torch.as_tensor(counts)
    if interval < 1:
        raise mismatch("interval", "a positive int", interval)
    if table.ndim != 2 or table.is_floating_point() or len(table) != -(-len(training) // interval) or bool((table < 0).any()):
        raise mismatch("counts", f"whole numbers, a row for each of {-(-len(training) // interval)} intervals", tuple(table.shape))
    for number, row in enumerate(table):
        there = sum(one.clients for one in training[number * interval : (number + 1) * interval])
        if int(row.sum()) != there:
            raise ValueError(f"counts[{number}]: the counts add up to {int(row.sum())}, and its rounds had {there} clients")
    return table


def _alone(seen: Exposure, training: MeanOfClients, flat: Tensor, samples: Tensor) -> Exposure:
    """The exposure of one client, whose number of samples is known where it comes out whole."""
    update: Update = {}
    for name, part in zip(seen.update, flat.split([change.numel() for change in seen.update.values()]), strict=True):
        update[name] = part.reshape(seen.update[name].shape).to(seen.update[name])
    number = round(float(samples))
    whole = number >= 1 and abs(float(samples) - number) <= WHOLE_SIZE
    kept = tuple(one for one in seen.public.defenses if one.name != "secure_aggregation" and one.side != "update")
    kept = (*kept, DEFENSES.build("unmodelled"))  # how far updates differed between rounds
    public = replace(seen.public, batch_size=number if whole else None, training=training.each, defenses=kept)
    return replace(seen, update=update, public=public)
