"""What each candidate would add to the update, a few candidates at a time."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.gradients import per_sample_gradients
from dosimeter.interfaces import Exposure
from dosimeter.network.copies import deep_copy
from dosimeter.types import Batch, Refused, Update

VALUES_AT_ONCE = 2**23  # of candidates' gradients held in memory at one time; float64 copies and activations take several times as much
TRIED = 4  # candidates on which it is checked that the update is a mean over samples
LARGEST_MISFIT = 1e-2  # relative; rounding stays far below


def candidates_of(exposure: Exposure, method: str) -> Batch:
    """The candidates, checked against what the model takes."""
    candidates = exposure.candidates
    if candidates is None or not len(candidates.inputs):
        raise Refused(f"{method} needs candidates: samples with labels that the server holds itself; dm.test_membership takes them")
    return candidates


def candidate_terms(
    exposure: Exposure, method: str, wanted: Collection[str] | None = None, model: nn.Module | None = None
) -> Iterator[tuple[slice, Update]]:
    """The candidates' own terms of the parameters `wanted` (k, *parameter shape), and which candidates they are.

    Where the update is no mean of such terms, they are the candidates' gradients.
    """
    candidates, public = candidates_of(exposure, method), exposure.public
    model = deep_copy(exposure.model if model is None else model)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    piece = max(1, VALUES_AT_ONCE // max(1, parameters))
    for first in range(0, len(candidates.inputs), piece):
        here = slice(first, min(first + piece, len(candidates.inputs)))
        gradients = per_sample_gradients(model, candidates.inputs[here], candidates.targets[here], public.loss, wanted_by=method)
        yield here, _terms(gradients, public.training, exposure.update if wanted is None else wanted)


def require_mean(exposure: Exposure, method: str) -> None:
    """Refuse an update that is no mean of terms of single samples: the training, the loss or the model joins them otherwise."""
    training, candidates = exposure.public.training, candidates_of(exposure, method)
    if training.sample_term({}) is None:
        raise Refused(f"{method} needs an update that is a mean over samples; {training.name} sends none")
    few = slice(0, min(TRIED, len(candidates.inputs)))
    own = deep_copy(exposure.model)
    gradients = per_sample_gradients(own, candidates.inputs[few], candidates.targets[few], exposure.public.loss, wanted_by=method)
    terms = _terms(gradients, training, exposure.update)
    together = training(own, candidates.inputs[few], candidates.targets[few], exposure.public.loss)
    missed = sum(float((together[name] - term.mean(0)).double().square().sum()) for name, term in terms.items())
    size = sum(float(together[name].double().square().sum()) for name in terms)
    if missed > LARGEST_MISFIT**2 * size:
        raise Refused(
            f"{method} needs an update that is a mean over samples; here the gradient of {few.stop} candidates together is not the mean of "
            "their own, since the model mixes or draws at random, or the loss weighs samples"
        )


def _terms(gradients: Update, training: Any, wanted: Collection[str]) -> Update:
    count = len(next(iter(gradients.values())))
    if training.sample_term({}) is None:
        return {name: rows.detach() for name, rows in gradients.items() if name in wanted}
    each = [training.sample_term({name: rows[place] for name, rows in gradients.items()}) or {} for place in range(count)]
    return {name: torch.stack([term[name].detach() for term in each]) for name in gradients if name in wanted}


def flat(terms: Update) -> Tensor:
    """All entries of each candidate in one row: (k, entries)."""
    return torch.cat([term.flatten(1) for term in terms.values()], 1)
