"""Membership from the spans of a layer's gradient."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.engines.membership.estimate import MembershipEstimate
from dosimeter.engines.membership.spans import CLAIMED_SHARE, SMALLEST_EXCLUSION, Span, missing_rows, span_of, span_test
from dosimeter.engines.membership.terms import candidate_terms, require_mean
from dosimeter.engines.premises import premises_of
from dosimeter.interfaces import Exposure, MembershipTest
from dosimeter.network.head import find_head
from dosimeter.network.probing import record_calls
from dosimeter.registry import MEMBERSHIP
from dosimeter.types import Batch, Knowledge, Refused

RIVAL_CLASSES = 3  # other classes that are tried in the place of a member's own
COSTLY, TOO_COSTLY = 2e9, 1e11  # operations of a layer's factorisation: where another layer decides, and where none does
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
NEAR_COPIES = (
    "a sample outside the batch has no features in the span of the batch's, up to the error bar: a near copy of a member counts as it, "
    "and so does an input that the layer does not tell from it"
)
NO_CANCELLING = "what the samples add to a token's row does not cancel to the last bit"


@MEMBERSHIP.register("spans")
@dataclass(frozen=True, kw_only=True)
class Spans(MembershipTest):
    """Decides each candidate exactly, where a layer has more room than the batch fills: a member's gradient lies in the update's span.

    Ours. The head, linear layers and convolutions are tried; the one with the smallest error bar decides. Of texts that fill every layer,
    the rows of the embedding still exclude candidates with a token that left no trace.
    """

    needs = frozenset({Knowledge.CANDIDATES, Knowledge.BATCH_SIZE})
    smallest_share: ClassVar[float] = 1e-3  # of a candidate's gradient in rows that the update lacks, from which on it is excluded

    def __call__(self, exposure: Exposure, candidates: Batch, rng: Generator) -> MembershipEstimate:
        _refuse_distortion(exposure, self.name)
        require_mean(exposure, self.name)
        if span := _best_span(exposure, candidates):
            return _by_span(exposure, candidates, span)
        if found := self._by_rows(exposure):
            return found
        size = exposure.public.batch_size
        raise Refused(
            f"spans: no layer has more room than a batch of {size} fills, so that no span decides; "
            "a smaller batch or a wider layer would, or declared noise, behind which a likelihood is computed"
        )

    def _by_rows(self, exposure: Exposure) -> MembershipEstimate | None:
        """Which candidates have tokens that the embedding's rows lack; None without a row that lacks anything."""
        for name, module in exposure.model.named_modules():
            sent = exposure.update.get(f"{name}.weight" if name else "weight")
            if not isinstance(module, nn.Embedding) or sent is None or bool((sent != 0).any(1).all()):
                continue
            parameter = f"{name}.weight" if name else "weight"
            size = exposure.public.batch_size or 1
            missed = torch.cat(
                [missing_rows(sent, terms[parameter], size) for _, terms in candidate_terms(exposure, self.name, {parameter})]
            )
            nobody = torch.zeros(len(missed), dtype=torch.bool, device=missed.device)
            excluded = missed > self.smallest_share
            said = "no layer has room for a span: the embedding's rows exclude candidates, and prove nobody a member"
            return MembershipEstimate(
                scores=-missed,
                members=nobody,
                excluded=excluded,
                test=self.name,
                layer=name,
                message=said,
                premises=(*premises_of(exposure.public, size_matters=False), NO_CANCELLING),
            )
        return None


def _by_span(exposure: Exposure, candidates: Batch, span: Span) -> MembershipEstimate:
    parameter = f"{span.layer}.weight" if span.layer else "weight"
    found = None
    for _, terms in candidate_terms(exposure, "spans", {parameter}):
        test = span_test(span, terms[parameter].flatten(2))
        found = test if found is None else found.joined(test)
    assert found is not None
    members = found.distances <= CLAIMED_SHARE * span.error_bar
    open_labels = _label_is_open(exposure, candidates, span, members)
    undecided = f"{int(open_labels.sum())} candidates fit under another label as well: {span.layer} does not tell which"
    return MembershipEstimate(
        scores=-found.distances.clamp(min=torch.finfo(torch.float64).tiny).log10(),
        members=members & ~open_labels,
        excluded=found.outside > max(2 * span.error_bar, SMALLEST_EXCLUSION),
        error_bar=span.error_bar,
        layer=span.layer,
        test="spans",
        premises=(*premises_of(exposure.public), NEAR_COPIES),
        message=undecided if bool(open_labels.any()) else "",
    )


def _label_is_open(exposure: Exposure, candidates: Batch, span: Span, members: Tensor) -> Tensor:
    """Which members fit under another class as well, as where two rows of the head are equal: (n,) bool. The nearest rows are tried."""
    targets, classes = candidates.targets, exposure.public.classes
    is_open = torch.zeros_like(members)
    if targets.ndim != 1 or targets.is_floating_point() or classes < 2 or not bool(members.any()):
        return is_open
    places = members.nonzero().flatten().to(targets.device)
    inputs, labels = candidates.inputs[places], targets[places].long()
    for near in _nearest_classes(exposure, labels, min(RIVAL_CLASSES, classes - 1)).T:
        rivals = replace(exposure, candidates=Batch(inputs, near.to(targets)))
        parameter = f"{span.layer}.weight" if span.layer else "weight"
        for here, terms in candidate_terms(rivals, "spans", {parameter}):
            is_open[places[here]] |= span_test(span, terms[parameter].flatten(2)).distances <= span.error_bar
    return is_open


def _nearest_classes(exposure: Exposure, labels: Tensor, count: int) -> Tensor:
    """Other classes whose rows of the head are nearest to those of these labels (k,): (k, count). Any, where there is no head."""
    classes = exposure.public.classes
    try:
        rows = find_head(exposure).weight.double().to(labels.device)
        apart = torch.cdist(rows[labels], rows, compute_mode="donot_use_mm_for_euclid_dist")
    except Refused:
        apart = torch.zeros(len(labels), classes, dtype=torch.float64, device=labels.device)
    return apart.scatter(1, labels[:, None], torch.inf).topk(count, dim=1, largest=False).indices


def _best_span(exposure: Exposure, candidates: Batch) -> Span | None:
    """The span with the smallest error bar; None where no layer has room."""
    size, positions = exposure.public.batch_size or 1, _positions(exposure.model, candidates.inputs[:1])
    matrices = {layer: exposure.update.get(f"{layer}.weight" if layer else "weight") for layer in positions}
    sent = {layer: change.flatten(1) for layer, change in matrices.items() if change is not None and change.ndim >= 2}
    best: Span | None = None
    for layer in sorted(sent, key=lambda layer: _cost(sent[layer])):
        if _cost(sent[layer]) > (COSTLY if best else TOO_COSTLY):
            break
        span = span_of(layer, sent[layer], batch_size=size, positions=positions[layer])
        best = min(filter(None, (best, span)), key=lambda one: one.error_bar, default=None)
    return best


def _cost(matrix: Tensor) -> float:
    """Operations of a factorisation."""
    return float(matrix.numel() * min(matrix.shape))


def _positions(model: nn.Module, sample: Tensor) -> dict[str, int]:
    """At how many places of one sample each linear layer and convolution acts: its gradient of one sample has that rank at most.

    A layer that is used twice, one that shares its weight, and a convolution in groups are left out.
    """
    _, calls = record_calls(model, sample, lambda _, module: isinstance(module, LAYERS))
    names = [call.name for call in calls]
    weights = [parameter for _, parameter in model.named_parameters(remove_duplicate=False)]
    found = {}
    for call in calls:
        grouped = getattr(call.module, "groups", 1) > 1
        shared = sum(parameter is call.module.weight for parameter in weights) > 1
        if names.count(call.name) == 1 and not grouped and not shared:
            channels = call.given.shape[-1 if isinstance(call.module, nn.Linear) else 1]
            found[call.name] = call.given.numel() // channels
    return found


def _refuse_distortion(exposure: Exposure, method: str) -> None:
    """Refuse what changes entries. A defense that only leaves layers out does no harm."""
    for defense in exposure.public.defenses:
        if defense.side == "data" or defense.distorts() or (defense.side == "update" and defense.scaling() != "none"):
            instead = "; likelihood scores candidates there" if defense.adds_noise() or defense.noise_multiplier_of(None) else ""
            raise Refused(f"{method} reads exact gradients, and this client has {defense.name}{instead}")
