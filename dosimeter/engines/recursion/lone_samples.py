"""Samples that fire a neuron of the first layer alone, each with a proof that it is one sample and no mixture."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.premises import premises_of
from dosimeter.engines.recursion.own_gradients import OwnGradients
from dosimeter.engines.recursion.row_quotients import SAME_QUOTIENT, Quotients, find_quotients
from dosimeter.engines.row_errors import quotients_keep_their_scale, row_errors
from dosimeter.engines.subspace.distortion import unmodelled
from dosimeter.interfaces import Exposure, Public
from dosimeter.types import LabelEstimate, Outcome, Reconstruction

SAME_SAMPLE = 0.05  # relative distance up to which two quotients show one sample, the noisier one included
EXACT_AGREEMENT = 3e-6  # relative distance up to which rows agree without a known share to check them by
NEAR_AGREEMENT = 1e-3  # relative distance within which most rows agree exactly, if they show one sample
COMPARED_ROWS = 6  # of those that agree, the rows with the largest gradients
INDEPENDENT_ROWS = 4  # that agree exactly: mixtures weigh their samples by other shares in one of them


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The gradients of layers that take the raw input and have a bias."""

    weights: list[str]
    biases: list[str]

    def gradients(self, exposure: Exposure) -> tuple[Tensor, Tensor]:
        """(k, d) and (k,)."""
        return torch.cat([exposure.update[name].flatten(1) for name in self.weights]), torch.cat([exposure.update[b] for b in self.biases])


def read_lone_samples(exposure: Exposure, first: FirstRows, labels: LabelEstimate | None, tampered: str = "") -> Reconstruction:
    """The samples that rows prove. Any of these proves a quotient to be one sample:

    - Its pixels lie on many of a picture's 256 levels, unlike those of a mixture.
    - Two rows agree on it, and the model gives it by itself the gradient that these rows have (`OwnGradients`).
    - Four rows with independent slopes agree on it exactly. A mixture has other shares in each of them.

    Two rows that agree prove nothing by themselves: with two classes the slopes of all rows are proportional. A row that a defense may have
    changed visibly does not count.
    """
    public = exposure.public
    hidden = unmodelled(exposure.update[first.weights[0]], public)
    if hidden:
        return exposure.without_inputs(Outcome.SINGULAR, f"{hidden} changes the update in ways that it does not declare: nothing is proved")
    weight, bias = first.gradients(exposure)
    quotients = find_quotients(weight, bias, _errors_of_defenses(exposure, first), public.input_shape, public.normalization)
    soft = None if labels is None or labels.soft is None else labels.soft
    chosen, by_levels = _proved(quotients, bias.double(), _own_gradients(exposure, first, soft), public)
    left = _count_distinct(quotients) - len(chosen)
    count, size = len(chosen), public.batch_size
    if size is not None and count > size:
        message = f"{count} inputs pass for samples, more than the declared {size}: the declared size is wrong, and nothing is claimed"
        return exposure.without_inputs(Outcome.AMBIGUOUS, message)
    enough = size is not None and count >= size
    return Reconstruction(
        inputs=quotients.inputs[chosen].to(weight),
        labels=torch.full((count,), -1, device=weight.device),
        objective=0.0 if count else torch.inf,
        normalization=public.normalization,
        outcome=Outcome.COMPLETED if enough else Outcome.PARTIAL if count else Outcome.SINGULAR,
        message=f"{count} samples fire a neuron of the first layer alone; {max(left, 0)} quotients that nothing proves are not claimed",
        premises=_premises(public, by_levels, tampered) if count else (),
    )


def doubt_of_quotients(exposure: Exposure, first: FirstRows) -> str:
    """Why the quotients of all rows may not be the input of a batch of one; "" where nothing declared speaks against it."""
    public = exposure.public
    hidden = unmodelled(exposure.update[first.weights[0]], public)
    if hidden:
        return f"{hidden} changes the update in ways that it does not declare"
    if not quotients_keep_their_scale(public):
        return "a defense may have scaled the gradients of weights and biases by factors of their own, so that the input's scale is unknown"
    return ""


def _premises(public: Public, by_levels: bool, tampered: str) -> tuple[str, ...]:
    said = premises_of(public)
    if by_levels:
        said = (*said, "the inputs are pictures of 256 levels a pixel")
    return (*said, f"the client trained the model with {tampered}, as sent") if tampered else said


def _own_gradients(exposure: Exposure, first: FirstRows, soft: Tensor | None) -> OwnGradients | None:
    own = OwnGradients(exposure, first.biases, soft)
    return own if own.is_possible() else None


def _proved(quotients: Quotients, bias: Tensor, own: OwnGradients | None, public: Public) -> tuple[list[int], bool]:
    """The quotients that are proved, one of each sample, and whether levels prove any of them."""
    votes = (quotients.apart <= SAME_QUOTIENT).sum(1)  # itself among them
    chosen: list[int] = []

    def is_new(candidate: int) -> bool:
        return not bool((quotients.apart[candidate, chosen] <= SAME_SAMPLE).any())

    for candidate in (votes * quotients.pictures).argsort(descending=True, stable=True)[: int(quotients.pictures.sum())].tolist():
        if is_new(candidate):
            chosen.append(candidate)
    by_levels = bool(chosen)
    if own is None or not quotients_keep_their_scale(public):
        return chosen, by_levels
    tried = torch.zeros_like(quotients.mixtures)
    for candidate in votes.argsort(descending=True, stable=True).tolist():
        agreeing = quotients.apart[candidate] <= SAME_QUOTIENT
        if votes[candidate] < 2 or quotients.mixtures[candidate] or bool(tried[candidate]) or not is_new(candidate):
            continue
        tried |= agreeing
        if _is_one_sample(quotients, candidate, agreeing, bias, own):
            chosen.append(candidate)
    return chosen, by_levels


def _is_one_sample(quotients: Quotients, candidate: int, agreeing: Tensor, bias: Tensor, own: OwnGradients) -> bool:
    inputs = quotients.inputs[candidate]

    def largest(agreeing: Tensor) -> Tensor:
        rows = quotients.rows[agreeing]
        return rows[bias[rows].abs().argsort(descending=True)[:COMPARED_ROWS]]

    rows = largest(agreeing)
    if own.explain(own.respond(inputs, rows), bias[rows]):
        return True
    exact, near = (quotients.apart[candidate] <= distance for distance in (EXACT_AGREEMENT, NEAR_AGREEMENT))
    if 2 * int(exact.sum()) < int(near.sum()):  # rows of mixtures lie around it, of which some agree by chance
        return False
    exact = largest(exact)
    return len(exact) >= INDEPENDENT_ROWS and own.count_independent(own.respond(inputs, exact)) >= INDEPENDENT_ROWS


def _errors_of_defenses(exposure: Exposure, first: FirstRows) -> Tensor:
    """The relative error that the declared defenses may leave in each row's quotient: (k,) root mean square."""
    parts = [
        torch.hypot(_relative_error(exposure, weight), _relative_error(exposure, bias))
        for weight, bias in zip(first.weights, first.biases, strict=True)
    ]
    return torch.cat(parts)


def _relative_error(exposure: Exposure, name: str) -> Tensor:
    """Of each row of one parameter, root mean square: (k,)."""
    change = exposure.update[name]
    sizes = change.double().reshape(len(change), -1).norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    return row_errors(change, exposure.model.get_parameter(name), exposure.public).norms / sizes


def _count_distinct(quotients: Quotients) -> int:
    """How many different inputs the quotients show."""
    return int((~torch.tril(quotients.apart <= SAME_SAMPLE, -1).any(1)).sum())
