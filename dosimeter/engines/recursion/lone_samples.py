"""Samples that fire a neuron of the first layer alone, each with a proof that it is one sample and no mixture."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.cancelling_labels import sums_may_pass
from dosimeter.engines.premises import premises_of
from dosimeter.engines.recursion.black_and_white import PREMISE as BLACK_AND_WHITE
from dosimeter.engines.recursion.black_and_white import Rows, black_and_white, reach_of
from dosimeter.engines.recursion.common_share import find_share
from dosimeter.engines.recursion.local_steps import LocalSteps
from dosimeter.engines.recursion.own_gradients import LIKELY, Comparison, OwnGradients, Share
from dosimeter.engines.recursion.row_quotients import SAME_QUOTIENT, Quotients, find_quotients
from dosimeter.engines.row_errors import quotients_keep_their_scale, row_errors
from dosimeter.engines.sample_share import largest_share, sends_gradient_at_model
from dosimeter.engines.subspace.distortion import unmodelled
from dosimeter.engines.whole_batch import WholeBatch
from dosimeter.interfaces import Exposure, Public
from dosimeter.types import LabelEstimate, Outcome, Reconstruction

SAME_SAMPLE = 0.05  # relative distance up to which two quotients show one sample, the noisier one included
EXACT_AGREEMENT = 3e-6  # relative distance up to which rows agree without a known share to check them by
NEAR_AGREEMENT = 1e-3  # relative distance within which the rows of mixtures are counted
AGREEING_NOISE = 2.0  # times the error of a quotient by which rows that agree may differ
COMPARED_ROWS = 8  # of those that agree, the rows with the largest gradients
COMPARED_NOISY_ROWS = 24  # the same where rows have noise, which the mean over many rows reduces


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The gradients of layers that take the raw input and have a bias."""

    weights: list[str]
    biases: list[str]

    def gradients(self, exposure: Exposure) -> tuple[Tensor, Tensor]:
        """(k, d) and (k,)."""
        return torch.cat([exposure.update[name].flatten(1) for name in self.weights]), torch.cat([exposure.update[b] for b in self.biases])

    def noise(self, exposure: Exposure) -> Tensor:
        """The standard deviation of what defenses and the rounding of weights added to each bias: (k,)."""
        return torch.cat([row_errors(exposure.update[b], exposure.model.get_parameter(b), exposure.public).norms for b in self.biases])


def read_lone_samples(exposure: Exposure, first: FirstRows, labels: LabelEstimate | None, tampered: str = "") -> Reconstruction:
    """The samples that rows prove. Any of these proves a quotient to be one sample:

    - Its pixels lie on many of a picture's 256 levels, unlike those of a mixture, but for the sums in `sums_may_pass`.
    - Two rows agree on it, and the model gives it by itself the gradient that these rows have (`OwnGradients`).
    - Local steps change the neurons of these rows as the input changes them by itself (`LocalSteps`).
    - So many rows with independent slopes agree on it that a mixture, which has other shares in each of them, hardly would by chance.
    - All its pixels are black or white, as near as the declared rounding or pruning of entries shows them (`black_and_white`).
    - It is one of as many quotients as samples are declared, and these give the whole update (`WholeBatch`).

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
    inputs, by_levels = _prove(exposure, first, quotients, _own_gradients(exposure, first, soft))
    left = _count_distinct(quotients) - len(inputs)
    pictures = _black_and_white(exposure, first, inputs)
    inputs = torch.cat([inputs, pictures])
    count, size = len(inputs), public.batch_size
    if size is not None and count > size:
        message = f"{count} inputs pass for samples, more than the declared {size}: the declared size is wrong, and nothing is claimed"
        return exposure.without_inputs(Outcome.AMBIGUOUS, message)
    enough = size is not None and count >= size
    return Reconstruction(
        inputs=inputs.to(weight),
        labels=torch.full((count,), -1, device=weight.device),
        objective=0.0 if count else torch.inf,
        normalization=public.normalization,
        outcome=Outcome.COMPLETED if enough else Outcome.PARTIAL if count else Outcome.SINGULAR,
        message=f"{count} samples fire a neuron of the first layer alone; {max(left, 0)} quotients that nothing proves are not claimed",
        premises=_premises(public, by_levels, tampered, black_and_white=len(pictures) > 0) if count else (),
    )


def doubt_of_quotients(exposure: Exposure, first: FirstRows) -> str:
    """Why the quotients of all rows may not be the input of a batch of one; "" where nothing declared speaks against it."""
    public = exposure.public
    hidden = unmodelled(exposure.update[first.weights[0]], public)
    if hidden:
        return f"{hidden} changes the update in ways that it does not declare"
    if not quotients_keep_their_scale(public, exposure.update, [*first.weights, *first.biases]):
        return "a defense may have scaled the gradients of weights and biases by factors of their own, so that the input's scale is unknown"
    return ""


def _premises(public: Public, by_levels: bool, tampered: str, *, black_and_white: bool) -> tuple[str, ...]:
    said = premises_of(public)
    if by_levels:
        said = (*said, "the inputs are pictures of 256 levels a pixel")
    if black_and_white:
        said = (*said, BLACK_AND_WHITE)
    return (*said, f"the client trained the model with {tampered}, as sent") if tampered else said


def _black_and_white(exposure: Exposure, first: FirstRows, found: Tensor) -> Tensor:
    """Pictures in black and white (n, *shape) beside those that were found, where a defense rounded or pruned entries."""
    public = exposure.public
    if not any(defense.distorts() for defense in public.defenses):
        return found[:0]
    if not quotients_keep_their_scale(public, exposure.update, [*first.weights, *first.biases]):
        return found[:0]
    weight, bias = first.gradients(exposure)
    weight_reach = torch.cat([reach_of(exposure.update[name], public).flatten(1) for name in first.weights])
    bias_reach = torch.cat([reach_of(exposure.update[name], public) for name in first.biases])
    rows = Rows(weight=weight, bias=bias, weight_reach=weight_reach, bias_reach=bias_reach)
    pictures = black_and_white(rows, public.input_shape, public.normalization)[1]
    pictures = pictures[~sums_may_pass(exposure, pictures)]
    known = torch.cdist(pictures, found.flatten(1)) <= SAME_SAMPLE * pictures.norm(dim=1, keepdim=True)
    return pictures[~known.any(1)].reshape(-1, *public.input_shape)


def _own_gradients(exposure: Exposure, first: FirstRows, soft: Tensor | None) -> OwnGradients | None:
    if exposure.public.loss.target_kind() == "numbers":
        return None  # numbers cannot be tried one by one
    own = OwnGradients(exposure, first.biases, soft)
    return own if own.is_possible() else None


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """An input on which several rows agree."""

    place: int  # among the quotients
    inputs: Tensor  # (d,) the mean over the rows that agree
    comparison: Comparison


def _prove(exposure: Exposure, first: FirstRows, quotients: Quotients, own: OwnGradients | None) -> tuple[Tensor, bool]:
    """The inputs (n, *shape) that are proved, one of each sample, and whether levels prove any of them."""
    public = exposure.public
    votes = quotients.agree(SAME_QUOTIENT).sum(1)  # itself among them
    chosen: list[int] = []
    proved: list[Tensor] = []

    def is_new(place: int) -> bool:
        return not bool((quotients.apart[place, chosen] <= SAME_SAMPLE).any())

    pictures = quotients.pictures.clone()
    pictures[quotients.pictures] &= ~sums_may_pass(exposure, quotients.inputs[quotients.pictures])
    for place in (votes * pictures).argsort(descending=True, stable=True)[: int(pictures.sum())].tolist():
        if is_new(place):
            chosen.append(place)
            proved.append(quotients.inputs[place])
    by_levels = bool(chosen)
    if own is not None and quotients_keep_their_scale(public, exposure.update, [*first.weights, *first.biases]):
        candidates = _candidates(exposure, first, quotients, votes, own)
        share = _share(public, own, candidates)
        for one in candidates:
            explained = share is not None and one.comparison.explains(share.value, share.spread)
            if is_new(one.place) and (explained or _rows_prove(exposure, first, quotients, one, own)):
                chosen.append(one.place)
                proved.append(one.inputs.reshape(quotients.inputs.shape[1:]))
        whole = _whole_batch(exposure, quotients, candidates, chosen, proved)
        proved = proved if whole is None else [*whole]
    return torch.stack(proved) if proved else quotients.inputs[:0], by_levels


def _candidates(exposure: Exposure, first: FirstRows, quotients: Quotients, votes: Tensor, own: OwnGradients) -> list[_Candidate]:
    """The inputs on which at least two rows agree, those with most rows first."""
    weight, bias = (gradient.double() for gradient in first.gradients(exposure))
    noise = first.noise(exposure)
    agreeing, same = quotients.agree(SAME_QUOTIENT), quotients.agree(EXACT_AGREEMENT)
    found, tried = [], torch.zeros_like(quotients.mixtures)
    for place in votes.argsort(descending=True, stable=True).tolist():
        if votes[place] < 2 or quotients.mixtures[place] or bool(tried[place]):
            continue
        tried |= agreeing[place]
        pooled = same[place]
        rows = quotients.rows[pooled]
        scale = bias[rows].square().sum()
        inputs = (bias[rows] @ weight[rows]) / scale  # least squares over all rows
        added = quotients.errors[pooled] * weight[rows].norm(dim=1) * bias[rows] / scale
        rows = _largest(quotients.rows[agreeing[place]], bias, COMPARED_ROWS if float(noise[rows].max()) == 0 else COMPARED_NOISY_ROWS)
        comparison = own.compare(
            own.respond(inputs, rows), bias[rows], float(noise[rows].max()), float(added.norm() / inputs.norm().clamp_min(1e-300))
        )
        found.append(_Candidate(place=place, inputs=inputs, comparison=comparison))
    return found


def _whole_batch(
    exposure: Exposure, quotients: Quotients, candidates: list[_Candidate], chosen: list[int], proved: list[Tensor]
) -> Tensor | None:
    """The samples of the batch, if quotients give the whole update together: first those on which rows agree, then any."""
    whole = WholeBatch(exposure)
    if len(proved) == whole.size or not whole.is_possible():
        return None
    places, inputs, shape = list(chosen), list(proved), quotients.inputs.shape[1:]
    agreed = [(one.place, one.inputs.reshape(shape)) for one in candidates]
    for more in (agreed, [(place, quotients.inputs[place]) for place in range(len(quotients))]):
        for place, candidate in more:
            if not quotients.mixtures[place] and not bool((quotients.apart[place, places] <= SAME_SAMPLE).any()):
                places.append(place)
                inputs.append(candidate)
        found = whole.find(torch.stack(inputs)) if inputs else None
        if found is not None and set(range(len(proved))) <= set(found.places.tolist()):
            return torch.stack(inputs)[found.places]
    return None


def _share(public: Public, own: OwnGradients, candidates: list[_Candidate]) -> Share | None:
    """The share of one sample in the update: as declared, or as several inputs have it in common."""
    if own.share is not None:
        return Share(value=own.share, spread=0.0, luck=0.0)
    if not sends_gradient_at_model(public.training):
        return None
    whole = all(defense.side != "update" or defense.scaling() == "none" for defense in public.defenses)
    return find_share([one.comparison.shares() for one in candidates], largest_share(public), whole=whole)


def _largest(rows: Tensor, bias: Tensor, count: int) -> Tensor:
    """The rows with the largest gradients."""
    return rows[bias[rows].abs().argsort(descending=True)[:count]]


def _rows_prove(exposure: Exposure, first: FirstRows, quotients: Quotients, one: _Candidate, own: OwnGradients) -> bool:
    """Whether rows that show mixtures hardly agree on this quotient, all on one mixture or each on another, or local steps tell."""
    distance = EXACT_AGREEMENT + AGREEING_NOISE * float(quotients.errors[one.place])
    exact, bias = quotients.agree(EXACT_AGREEMENT)[one.place], first.gradients(exposure)[1].double()
    response = own.respond(one.inputs, _largest(quotients.rows[exact], bias, COMPARED_ROWS))
    others = int(exact.sum()) - 1
    around = int((quotients.agree(NEAR_AGREEMENT)[one.place] & ~exact).sum())  # rows of mixtures, if any
    each = len(quotients) * (distance / NEAR_AGREEMENT * (1 + around)) ** others / math.factorial(min(others, 20))
    if max(each, own.luck_of_agreement(response, distance)) <= LIKELY:
        return True
    if len(first.biases) != 1 or bool(sums_may_pass(exposure, one.inputs[None]).any()):
        return False
    return LocalSteps(exposure, own, first.weights[0], first.biases[0]).explain(response, bias[response.rows])


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
