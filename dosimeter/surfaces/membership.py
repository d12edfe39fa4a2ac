"""Membership: whether a sample that the server holds itself is in a client's batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from scipy.special import betaincinv
from torch import Generator, Tensor

from dosimeter.engines.membership.estimate import MembershipEstimate, true_positive_bound
from dosimeter.interfaces import Exposure, Metric
from dosimeter.metrics.membership_rates import allowed_alarms, rate_of, threshold_at
from dosimeter.network.token_inputs import tensors_of
from dosimeter.numbers import percent
from dosimeter.randomness import generator
from dosimeter.registry import MEMBERSHIP
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import Comparison, Scores, Values, choose_metrics, no_foreign_null, number
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, LabelEstimate, Record

RATES = (0.001, 0.01, 0.1)  # of false alarms
ORDERS = 10_000  # of the candidates of a class, for the probability of luck
DOUBT = 0.05  # of the intervals
MARGIN = 0.1  # by which the share of members found must exceed each null's


@SURFACES.register("membership")
class Membership(Surface[MembershipEstimate]):
    """Which of many candidates are the client's samples."""

    position = 60
    reads = ("numbers", "regressions", "grids", "texts", "positions")
    estimate = MembershipEstimate
    methods = MEMBERSHIP
    key = plural = "membership"
    optional = True
    asks_about_candidates = True
    takes_labels = False
    per_sample = False
    gate_waits = False
    grid_methods: ClassVar = {"spans": {}, "likelihood": {}, "alignment": {}}
    headline = "members_at_1"
    also_plotted = ("members_at_10",)
    plot = "shares"

    description = (
        "Whether a sample that the server already holds is one of the client’s. Being in the batch can be the secret: that a person’s "
        "scan was taken at this clinic. The server tests the client’s samples among others, in an order that it does not know."
    )
    if_leaked = (
        "Whoever runs the server and holds a sample can tell from one update whether this client trained on it: "
        "that a given record is in the private data is no secret."
    )
    if_not_shown = "What was tried here told the client’s samples from others no better than its nulls. That is no proof of safety."
    null_words: ClassVar = {
        "guessing": ("guessing", "a test that looks at nothing: it finds as many members as it raises false alarms"),
        "foreign": (
            "foreign gradient",
            "the same test of the same candidates on another client’s update: what they give away by themselves",
        ),
    }
    share_words = "the members found at 1\u202f% false alarms, beyond guessing"
    counting_words = (
        "Membership counts as leaked if samples are proved to be in the batch, or if the batch’s samples stand out among candidates of "
        "their own class by more than luck explains, and by more than on another client’s update."
    )

    def recover(self, method: Any, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> MembershipEstimate:
        return method(exposure, exposure.candidates, rng)

    def score(self, found: MembershipEstimate, comparison: Comparison) -> Scores:
        return score_membership(found, comparison)

    def judge(self, found: MembershipEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        return judge_membership(found, scores, attempts)

    def may_leak(self, found: MembershipEstimate, scores: Scores) -> bool:
        return not bool(found.members.any()) and scores.details["chance"] <= LARGEST_CHANCE

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return number(value, 0.0) >= max((number(rival, 0.0) for rival in rivals), default=0.0) + MARGIN

    def proves(self, found: MembershipEstimate) -> bool:
        return bool(found.members.any() or found.excluded.any())

    def proof(self, found: MembershipEstimate) -> str:
        members, excluded = int(found.members.sum()), int(found.excluded.sum())
        said = f"{members} of {len(found.scores)} candidates proved to be in the batch, {excluded} proved not to be"
        return said if members or excluded else ""

    def proved_samples(self, found: MembershipEstimate, scores: Scores) -> list[bool]:
        return [scores.details["members"] == scores.details["proved"]]

    def without_proof(self, found: MembershipEstimate, message: str) -> MembershipEstimate:
        nobody = torch.zeros_like(found.members)
        return replace(found, members=nobody, excluded=nobody, premises=(), message=message)

    def share(self, record: Record) -> float:
        """The members found at 1 % false alarms, between guessing (0) and all (1)."""
        values = record.metrics.get(self.headline)
        return max(0.0, ((values[0] or 0.0) - 0.01) / 0.99) if values else 0.0

    def details(self, found: MembershipEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        bounded = {} if found.noise_multiplier is None else {"noise_multiplier": found.noise_multiplier}
        return {"test": found.test, "layer": found.layer, "error_bar": found.error_bar} | bounded

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        if isinstance(details.get("members"), int) and isinstance(details.get("others"), int):
            facts.append(f"{details['members']} samples of the batch among {details['others']} others")
        if details.get("layer"):
            facts.append(f"by the gradient of {details['layer']}")
        for point in details.get("roc") or []:
            if isinstance(point, dict) and {"rate", "found", "low", "high", "alarms", "alarms_up_to"} <= set(point):
                most = f", at most {percent(point['at_most'])} by differential privacy" if point.get("at_most") is not None else ""
                facts.append(
                    f"at {100 * point['rate']:g}\u202f% false alarms {percent(point['found'])} of the members found "
                    f"(95\u202f%: {percent(point['low'])} to {percent(point['high'])}{most}); "
                    f"{point['alarms']} of {details.get('others')} others passed, so the rate is below {percent(point['alarms_up_to'])}"
                )
        return facts

    def curves(self, details: Mapping[str, Any]) -> Mapping[str, Any]:
        curve = details.get("curve")
        return curve if isinstance(curve, dict) else {}


def score_membership(found: MembershipEstimate, comparison: Comparison) -> Scores:
    """How many of the batch's samples the test finds at few false alarms, beside guessing and the same test on a foreign update."""
    exposure = comparison.exposure
    if exposure is None or exposure.candidates is None:
        raise ValueError("exposure: expected the exposure with its candidates, since membership is scored on them")
    candidates = exposure.candidates
    if len(candidates.inputs) != len(found.scores):
        raise ValueError(f"found: expected a score for each of {len(candidates.inputs)} candidates, got {len(found.scores)}")
    inside = members_of(candidates, comparison.truth)
    scores = found.scores.detach().cpu().double()
    usable, unavailable = choose_metrics(comparison.metrics, "membership", None)
    nulls = {"guessing": {name: torch.tensor([getattr(metric, "rate", 0.5)], dtype=torch.float64) for name, metric in usable.items()}}
    classes = _classes(candidates.targets)
    details: dict[str, Any] = {
        "members": int(inside.sum()),
        "others": int((~inside).sum()),
        "proved": int((found.members.cpu() & inside).sum()),
        "excluded": int((found.excluded.cpu() & ~inside).sum()),
        "chance": chance_within_classes(scores, inside, classes),
        "roc": [_operating_point(rate, scores, inside, found.noise_multiplier) for rate in RATES],
        "curve": _curve(scores, inside, found.noise_multiplier),
    }
    if comparison.foreign is not None:
        elsewhere = comparison.foreign.scores.detach().cpu().double()
        nulls["foreign"] = _values(usable, elsewhere, inside)
        details["chance"] = max(details["chance"], chance_within_classes(_ranks(scores) - _ranks(elsewhere), inside, classes))
    if not any(defense.replaces for defense in exposure.public.defenses):
        details["false_certificates"] = int((found.members.cpu() & ~inside).sum() + (found.excluded.cpu() & inside).sum())
    return Scores(
        surface="membership",
        per_metric=_values(usable, scores, inside),
        nulls=nulls,
        assignment=None,
        unavailable=unavailable,
        details=details,
    )


def members_of(candidates: Batch, truth: Batch) -> Tensor:
    """Which candidates are samples of the private batch, bit by bit: (n,) bool."""

    def rows(batch: Batch) -> Tensor:
        return torch.cat([tensor.detach().cpu().double().flatten(1) for tensor in tensors_of(batch.inputs)], 1)

    mine, private = rows(candidates), rows(truth)
    return torch.stack([(mine == sample).all(1) for sample in private]).any(0)


def judge_membership(found: MembershipEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
    """Membership leaked where members are proved, or where the batch's samples stand out by more than luck and nulls explain.

    A claim that the truth refutes takes the verdict away. Without the null of a foreign gradient nothing counts as leaked that is not
    proved.
    """
    details = scores.details
    members, others = details["members"], details["others"]
    if refuted := details.get("false_certificates", 0):
        return Verdict.NOT_SHOWN, f"{refuted} claims are refuted by the truth: do not trust this run, and report it"
    if proved := int(found.members.sum()):
        apart = f"{details['excluded']} of {others} others proved not to be"
        return Verdict.LEAKED, f"{proved} of {members} samples proved to be in the batch, {apart}"
    metrics, nulls = scores.as_lists()
    shown = {name: number(values[0], 0.0) for name, values in metrics.items()}
    figures = f"{percent(shown.get('members_at_1', 0.0))} of {members} samples found at 1\u202f% false alarms"
    figures += f", {percent(shown.get('members_at_10', 0.0))} at 10\u202f%, among {others} others"
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(details.get('refused_nulls'))}"
    luck = luck_words(details["chance"], attempts)
    if correct_for_attempts(details["chance"], attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{figures}; the batch's samples stand out among candidates of their class, and {luck}"
    return Verdict.NOT_SHOWN, f"{figures}; within their classes {luck}, so this batch does not tell a leak from luck"


def chance_within_classes(values: Tensor, inside: Tensor, classes: Tensor) -> float:
    """The probability that members (n,) bool chosen at random within each class have ranks as high as these do: (k + 1)/(N + 1).

    van Elteren's stratified rank test, by permutations: that the update tells which classes are in the batch is no membership.
    """
    ranks = torch.zeros(len(values), dtype=torch.float64)
    drawn = torch.zeros(ORDERS, dtype=torch.float64)
    rng = generator(0, "orders of candidates")
    for one in classes[inside].unique():
        group = (classes == one).nonzero().flatten()
        count, size = int(inside[group].sum()), len(group)
        own = _ranks(values[group]) / (size + 1)
        ranks[group] = own
        keys = torch.rand(ORDERS, size, generator=rng, dtype=torch.float32)
        drawn += own[keys.topk(count, dim=1).indices].sum(1)
    reached = float(ranks[inside].sum()) - 1e-9
    return (int((drawn >= reached).sum()) + 1) / (ORDERS + 1)


def _classes(targets: Tensor) -> Tensor:
    """The class of each candidate, or one for all where targets are no classes: (n,)."""
    targets = targets.detach().cpu()
    if targets.ndim == 1 and not targets.is_floating_point():
        return targets
    if targets.ndim == 2 and targets.is_floating_point() and targets.shape[1] > 1:
        return targets.argmax(1)
    return torch.zeros(len(targets), dtype=torch.int64)


def _ranks(values: Tensor) -> Tensor:
    """Ranks from 1, ties with their mean: (n,)."""
    values = values.nan_to_num(nan=-torch.inf)
    below = (values[:, None] > values).sum(1).double()
    same = (values[:, None] == values).sum(1).double()
    return below + (same + 1) / 2


def _values(metrics: Mapping[str, Metric], scores: Tensor, inside: Tensor) -> dict[str, Tensor]:
    return {name: metric(scores, inside) for name, metric in metrics.items()}


def _operating_point(rate: float, scores: Tensor, inside: Tensor, noise_multiplier: float | None) -> dict[str, Any]:
    """The members found at a rate of false alarms, with the interval of Clopper and Pearson, and how sure that rate is."""
    clean = scores.nan_to_num(nan=-torch.inf)
    others = clean[~inside]
    threshold = threshold_at(rate, others)
    hits, alarms, members = int((clean[inside] > threshold).sum()), int((others > threshold).sum()), int(inside.sum())
    low, high = _interval(hits, members)
    level = rate_of(allowed_alarms(rate, len(others)), len(others))
    most = None if noise_multiplier is None else true_positive_bound(level, noise_multiplier=noise_multiplier).high
    return {
        "rate": rate,
        "found": hits / max(1, members),
        "low": low,
        "high": high,
        "alarms": alarms,
        "alarms_up_to": _interval(alarms, len(others))[1],
        "at_most": most,
    }


def _interval(hits: int, draws: int) -> tuple[float, float]:
    low = 0.0 if hits == 0 else float(betaincinv(hits, draws - hits + 1, DOUBT / 2))
    high = 1.0 if hits >= draws else float(betaincinv(hits + 1, draws - hits, 1 - DOUBT / 2))
    return low, high


def _curve(scores: Tensor, inside: Tensor, noise_multiplier: float | None) -> dict[str, list[list[float]]]:
    """Points (false alarms, members found): of the test, and the most that noise allows."""
    clean = scores.nan_to_num(nan=-torch.inf)
    others = clean[~inside].sort(descending=True).values
    count = len(others)
    steps = sorted({0, *(round(count * 10 ** (-place / 8)) for place in range(25))})
    found = []
    for allowed in steps:
        threshold = float(others[allowed]) if allowed < count else -torch.inf
        found.append([rate_of(allowed, count), float((clean[inside] > threshold).double().mean())])
    curves = {"found": found, "guessing": [[rate, rate] for rate in (0.001, 0.01, 0.1, 1.0)]}
    if noise_multiplier is None:
        return curves
    rates = [10 ** (-place / 8) for place in range(24, -1, -1)]
    most = [[rate, true_positive_bound(rate, noise_multiplier=noise_multiplier).high] for rate in rates]
    return curves | {"at most": most}
