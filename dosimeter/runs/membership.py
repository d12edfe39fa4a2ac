"""Is a known sample in the client's batch? The server's test of candidates that it holds itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.checks import check_exposure
from dosimeter.defenses.dpsgd import per_sample_gradients
from dosimeter.engines.bounds.reconstruction_robustness import SuccessBound
from dosimeter.engines.membership import CLAIMED_SHARE, SpanTest, likelihood_scores, span_test, true_positive_bound
from dosimeter.interfaces import Exposure, Training
from dosimeter.network.copies import deep_copy
from dosimeter.network.probing import record_calls
from dosimeter.types import Batch, Refused, Update

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d)
PREMISES = (
    "the update is one gradient of the declared loss at the weights that were sent",
    "the declared batch size is right",
    "a sample outside the batch has no features in the span of the batch's, up to the error bar: a near copy of a member counts as it",
)


@dataclass(frozen=True, kw_only=True)
class MembershipEstimate:
    """What an update says of each candidate: in the batch, not in it, or how likely."""

    scores: Tensor  # (n,) larger: more likely in the batch; in one update, comparable with one another
    members: Tensor  # (n,) bool: proved to be in the batch, under `premises`
    excluded: Tensor  # (n,) bool: proved not to be in it
    error_bar: float | None  # what rounding may add to a member's distance; None where nothing is proved
    layer: str  # whose gradient proves it; "" where nothing is proved
    test: str  # "span" or "likelihood"
    premises: tuple[str, ...] = ()
    noise_multiplier: float | None = None  # of the clipped mechanism, where the client has one: `bound` needs it

    def bound(self, false_positive_rate: float, *, replaced: bool = True) -> SuccessBound:
        """The largest share of members that any test of this one update finds, at a share of false alarms."""
        if self.noise_multiplier is None:
            raise Refused("a bound on membership needs a clipped update with Gaussian noise for each sample, such as dpsgd")
        return true_positive_bound(false_positive_rate, noise_multiplier=self.noise_multiplier, replaced=replaced)


def test_membership(exposure: Exposure, candidates: Batch) -> MembershipEstimate:
    """Test which candidates, samples with labels that the server holds itself, are in the client's batch.

    Without noise, the gradient of a linear layer, a convolution or the head decides it exactly where it has more room than the batch has
    samples: see `span_test`. Behind noise, candidates are scored by a likelihood, and nothing is proved.
    """
    check_exposure(exposure)
    public = exposure.public
    if public.batch_size is None:
        raise Refused("test_membership needs the batch size, which this client did not declare")
    noise, multiplier = _declared_noise(exposure)
    terms = _terms(exposure.model, candidates, public.training, public.loss)
    sent = {name: change for name, change in exposure.update.items() if name in terms}
    if noise:
        floors = {name: noise[name] for name in sent if noise.get(name, 0.0) > 0}
        scores = likelihood_scores(sent, terms, floors, public.batch_size)
        none = torch.zeros(len(scores), dtype=torch.bool)
        return MembershipEstimate(
            scores=scores, members=none, excluded=none, error_bar=None, layer="", test="likelihood", noise_multiplier=multiplier
        )
    tests = _span_tests(exposure, candidates, sent, terms)
    if not tests:
        raise Refused(
            f"test_membership: no layer has more room than a batch of {public.batch_size} fills, so that no span decides; "
            "a smaller batch or a wider layer would, or declared noise, behind which a likelihood is computed"
        )
    best = min(tests, key=lambda one: one.error_bar)
    return MembershipEstimate(
        scores=-best.distances.clamp(min=torch.finfo(torch.float64).tiny).log10(),
        members=best.distances <= CLAIMED_SHARE * best.error_bar,
        excluded=best.distances > max(2 * best.error_bar, 1e-3),
        error_bar=best.error_bar,
        layer=best.layer,
        test="span",
        premises=PREMISES,
    )


setattr(test_membership, "__test__", False)  # noqa: B010  for pytest, which collects functions of this name


def _declared_noise(exposure: Exposure) -> tuple[dict[str, float], float | None]:
    """The noise on each layer, and the noise multiplier for one sample; clipping of samples is part of the declared training."""
    public = exposure.public
    noise: dict[str, float] = {}
    multiplier: float | None = None
    for defense in public.defenses:
        if defense.side == "data" or (defense.side == "update" and not defense.adds_noise()):
            raise Refused(f"test_membership knows noise and dpsgd, and this client has {defense.name}")
        ratio = defense.noise_multiplier_of(None)
        multiplier = ratio[1] if ratio and ratio[0] == "sample" else multiplier
        for name, change in exposure.update.items():
            noise[name] = math.hypot(noise.get(name, 0.0), defense.noise_floor(change, public.batch_size or 1))
    return {name: floor for name, floor in noise.items() if floor > 0}, multiplier


def _terms(model: nn.Module, candidates: Batch, training: Training, loss: Any) -> Update:
    """What each candidate adds to the sum of the update: (n, *parameter shape) by name."""
    if training.sample_term({}) is None:
        raise Refused(f"test_membership needs an update that is a mean over samples; {training.name} sends none")
    gradients = per_sample_gradients(deep_copy(model), candidates.inputs, candidates.targets, loss)
    each = [training.sample_term({name: rows[place] for name, rows in gradients.items()}) for place in range(len(candidates.inputs))]
    return {name: torch.stack([term[name].detach() for term in each if term is not None]) for name in gradients}


def _span_tests(exposure: Exposure, candidates: Batch, sent: Update, terms: Update) -> list[SpanTest]:
    positions = _positions(exposure.model, candidates.inputs[:1])
    found = []
    for name, change in sent.items():
        layer = name.rpartition(".")[0]
        if not name.endswith("weight") or layer not in positions or change.ndim < 2:
            continue
        size = exposure.public.batch_size or 1
        test = span_test(layer, change.flatten(1), terms[name].flatten(2), batch_size=size, positions=positions[layer])
        found += [test] if test else []
    return found


def _positions(model: nn.Module, sample: Tensor) -> dict[str, int]:
    """How many places of one sample each linear layer and convolution reads: its gradient of one sample has that rank at most.

    A layer that is used twice, and a convolution in groups, are left out.
    """
    _, calls = record_calls(model, sample, lambda _, module: isinstance(module, LAYERS))
    names = [call.name for call in calls]
    found = {}
    for call in calls:
        grouped = getattr(call.module, "groups", 1) > 1
        if names.count(call.name) == 1 and not grouped:
            channels = call.given.shape[-1 if isinstance(call.module, nn.Linear) else 1]
            found[call.name] = call.given.numel() // channels
    return found
