"""Labels: how many samples of each class a batch holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Exposure, Public, Recovery
from dosimeter.metrics.insacc import InstanceAccuracy
from dosimeter.numbers import THIN, percent
from dosimeter.randomness import generator
from dosimeter.registry import LABELS
from dosimeter.surfaces.assignment import assign
from dosimeter.surfaces.inner_errors import inner_errors
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import Comparison, Nulls, Scores, Values, choose_metrics, compare_samples, number
from dosimeter.surfaces.several_labels import are_vectors, as_class_ids, score_several, vectors_shown
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, LabelEstimate, Record, Refused

GUESSED_BATCHES = (1_000, 10_000)  # label batches drawn for the null of label counts, fewer where there are many classes
LABEL_MASS_SLACK = 1e-2  # by which the entries of a soft label may miss a sum of 1
LARGEST_CERTIFIED_ERROR = 1e-2  # distance (L1) of a certified soft label from the true one
MOST_CLASSES = 8  # in the table of evidence
LEAST_TRUST = 1e6  # every scored record says more than one without scores
DOUBTFUL_SHARE = 0.25  # from this agreement on, between guessing (0) and perfect (1), the report says that luck may explain it


SEE_TARGETS = "dm.recover_targets reads them"


@SURFACES.register("labels")
class Labels(Surface[LabelEstimate]):
    """Which classes the samples of a batch belong to."""

    position = 10
    reads = ("numbers", "texts")
    estimate = LabelEstimate
    methods = LABELS
    key = plural = "labels"
    needs_head = True
    grid_methods: ClassVar = {"ilrg": {}, "llg": {}, "subspace": {}}
    headless_methods = ("gradient_bridge",)
    headline = "insacc"
    also_plotted = ("clsacc",)
    plot = "shares"
    per_sample = False
    takes_labels = False
    has_foreign_null = False

    description = (
        "Which classes the client’s samples belong to, and how many there are of each. A class can itself be the secret: "
        "a diagnosis, a purchase, a word that was typed."
    )
    if_leaked = "Whoever runs the server can tell what kinds of samples this client holds from one update, without seeing any."
    if_not_shown = "What was tried here did no better than luck can. That is no proof: another method or a larger budget may do better."
    null_words: ClassVar = {
        "prior": ("guessing", "labels guessed from how common each class is, averaged over many guesses"),
        "guess": ("guessing", "labels drawn at random, many times over: what luck alone gets right"),
    }
    share_words = "how far recovery is from guessing to perfect"

    def score(self, found: LabelEstimate, comparison: Comparison) -> Scores:
        return score_labels(found, comparison)

    def judge(self, found: LabelEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        refuted = bool(scores.details.get("false_certificates"))
        return judge_labels(*scores.as_lists(), scores.details["chance"], found.certified, attempts, refuted)

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        """False: the score of labels alone shows no leak. `chance` tells a leak from luck."""
        return False

    def check_reads(self, method: Recovery, public: Public) -> None:
        if public.loss.target_kind() == "numbers":
            raise Refused(f"{method.name} looks for classes, and the targets of {public.loss.name} are numbers; {SEE_TARGETS}")
        super().check_reads(method, public)

    def check_scorable(self, truth: Batch) -> None:
        check_one_label(as_class_ids(truth.targets))

    def proves(self, found: LabelEstimate) -> bool:
        return found.certified or ("proved" in found.details and bool(found.details["proved"].any()))

    def proof(self, found: LabelEstimate) -> str:
        least = found.counts if found.certified else found.details.get("proved", found.counts.new_zeros(1))
        proved, size = int(least.sum()), int(found.counts.sum())
        if not proved:
            return ""
        largest = least.argsort(descending=True, stable=True)[:MOST_CLASSES].tolist()
        classes = ", ".join(f"class {label} ({int(least[label])})" for label in largest if least[label] > 0)
        more = int((least > 0).sum()) - len(largest)
        return f"{proved} of {size} labels proved from the update alone: {classes}" + (f" and {more} more classes" if more > 0 else "")

    def proved_samples(self, found: LabelEstimate, scores: Scores) -> list[bool]:
        return [found.certified]

    def without_proof(self, found: LabelEstimate, message: str) -> LabelEstimate:
        computed = {name: value for name, value in found.details.items() if name != "proved"}
        return replace(found, certified=False, premises=(), details=computed, message=message)

    def details(self, found: LabelEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        details = {"counts": found.counts.tolist(), "certified": found.certified, "confidence": found.confidence}
        return (
            details
            | inner_errors(found, exposure, Batch(truth.inputs, as_class_ids(truth.targets)))
            | ({"proved": int(found.details["proved"].sum())} if "proved" in found.details else {})
        )

    def evidence(self, found: LabelEstimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        """How many samples of each class there are and were found, the most frequent first; before it, the label vectors if there are."""
        counts = found.counts
        true = None
        if comparison is not None:
            targets = as_class_ids(comparison.truth.targets.to(counts.device))
            ids = targets if targets.ndim == 1 else targets.argmax(1)
            width = max(len(counts), int(ids.max()) + 1)
            counts, true = _widen(counts, width), torch.bincount(ids, minlength=width)
            true = true if has_one_label(targets) else targets.sum(0).long()
        most = counts if true is None else torch.maximum(counts, true)
        shown = most.argsort(descending=True, stable=True)[: min(MOST_CLASSES, int((most > 0).sum()))].tolist()
        tables = [{f"class {i}": str(int(column[i])) for i in shown} for column in (counts, true) if column is not None]
        left = int((most > 0).sum()) - len(shown)
        caption = "samples of each class" + (f", and {left} more classes" if left else "")
        private = tables[1] if true is not None else None
        vectors = vectors_shown(found, None if comparison is None else comparison.truth.targets)
        counted = Evidence(kind="table", private=private, recovered=tables[0], caption=caption)
        return [counted] if vectors is None else [vectors, counted]

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        if isinstance(details.get("certified"), bool):
            proof = "certified: proved from the gradient alone" + (", wrongly" if details.get("false_certificates") else "")
            part = f"{details['proved']} of {sum(details.get('counts') or [])} labels proved" if details.get("proved") else "not certified"
            facts.append(proof if details["certified"] else part)
        if isinstance(details.get("confidence"), (int, float)):
            facts.append(f"the method’s own confidence {100 * details['confidence']:.1f}{THIN}%")
        return facts

    def advantage(self, record: Record) -> float:
        """Without scores, the answer of the recovery that is trusted most says most."""
        trust = getattr(LABELS.entry(record.method), "trust", 0) if not record.metrics and record.method in LABELS else 0
        return super().advantage(record) if record.metrics else trust - LEAST_TRUST

    def share(self, record: Record) -> float:
        """The agreement, between guessing (0) and perfect (1)."""
        if not record.metrics:
            return 0.0
        found, guessed = record.metrics["insacc"][0] or 0.0, record.nulls["prior"]["insacc"][0] or 0.0
        return max(0.0, (found - guessed) / (1 - guessed)) if guessed < 1 else 0.0

    def leaked_share(self, methods: Sequence[Sequence[Record]]) -> float:
        return max((self._mean_share(batches) for batches in methods if is_beyond_luck(batches, len(methods))), default=0.0)

    def doubt(self, methods: Sequence[Sequence[Record]]) -> str:
        """A sentence where the labels look recovered but the batches are too small to rule out luck."""
        if any(is_beyond_luck(batches, len(methods)) for batches in methods):
            return ""
        closest = max(methods, key=self._mean_share, default=[])
        if not closest or self._mean_share(closest) < DOUBTFUL_SHARE:
            return ""
        samples = sum(int(record.threat_model.get("batch_size") or 0) for record in closest)
        agreement = f"{percent(self._mean_share(closest))} of the way from guessing to perfect"
        return f"labels: {closest[0].method} came {agreement}, which {samples} samples are too few to tell from luck"

    def _mean_share(self, batches: Sequence[Record]) -> float:
        return sum(map(self.share, batches)) / len(batches)


def judge_labels(
    found: Mapping[str, Values], nulls: Nulls, chance: float, certified: bool, attempts: int = 1, refuted: bool = False
) -> tuple[Verdict, str]:
    """Labels leaked where they are proved, or recovered beyond chance. A proof that the truth refutes takes the verdict away.

    `chance` is the probability that luck agrees as well as the estimate. It is multiplied by the number of methods tried
    (Bonferroni), so that the best of many cannot win by luck.
    """
    share = f"{number(found['insacc'][0]):.0%} of the labels recovered (InsAcc), guessing gives {number(nulls['prior']['insacc'][0]):.0%}"
    if refuted:
        return Verdict.NOT_SHOWN, f"{share}; the certificate is refuted by the truth: do not trust this run, and report it"
    if certified:
        return Verdict.LEAKED, f"{share}; proved from the gradient alone"
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{share}; {luck}"
    return Verdict.NOT_SHOWN, f"{share}; {luck}, so this batch does not tell a leak from luck"


def has_one_label(targets: Tensor) -> bool:
    """Whether every sample has one label: a class id, or a soft label that sums to one."""
    if targets.ndim == 1:
        return True
    sums = targets.sum(1, dtype=torch.float64)
    return targets.shape[1] > 1 and bool(((sums - 1).abs() <= LABEL_MASS_SLACK).all())


def check_one_label(targets: Tensor) -> None:
    """Refuse targets that are neither one label a sample nor label vectors of zeros and ones."""
    if not has_one_label(targets) and not are_vectors(targets):
        sums = targets.sum(1, dtype=torch.float64)
        raise Refused(
            "the label recoveries read one label a sample, or label vectors of zeros and ones; the targets of these samples "
            f"sum to between {sums.min():.3g} and {sums.max():.3g}"
        )


def is_beyond_luck(batches: Sequence[Record], methods: int) -> bool:
    """Whether the batches together show a leak: one is proved, or all of them together rule out luck.

    The test is Fisher's method on each batch's probability of luck, times the number of methods tried (Bonferroni).
    """
    if any(record.details.get("false_certificates") for record in batches):
        return False
    if any(record.details.get("certified") for record in batches):
        return True
    chances = [record.details.get("chance") for record in batches]
    if any(chance is None for chance in chances):
        return any(record.verdict == Verdict.LEAKED for record in batches)
    evidence = -sum(math.log(max(float(chance), 1e-300)) for chance in chances if chance is not None)
    terms = [evidence**k / math.factorial(k) for k in range(len(chances))]  # the tail of χ² with 2n degrees, at twice the evidence
    return methods * math.exp(-evidence) * sum(terms) <= LARGEST_CHANCE


def score_labels(found: LabelEstimate, comparison: Comparison) -> Scores:
    """Compare the label counts, and with soft labels also the samples. The null draws whole batches from the prior."""
    truth, auxiliary, foreign = as_class_ids(comparison.truth.targets), comparison.auxiliary, comparison.foreign
    check_one_label(truth)
    if not has_one_label(truth):
        return score_several(found, comparison, _chance)
    device = found.counts.device
    batches = [truth.to(device)] + ([] if auxiliary is None else [as_class_ids(auxiliary.targets.to(device))])
    estimates: list[LabelEstimate] = [estimate for estimate in (found, foreign) if estimate is not None]
    narrow = [len(estimate.counts) for estimate in estimates] + [_classes(_rows(estimate)) for estimate in estimates]
    width = max(2, comparison.classes or 0, *narrow, *map(_classes, batches))
    wanted = _widen(as_distribution(batches[0], width, torch.float64), width)  # (B, C)
    true_counts = torch.bincount(wanted.argmax(1), minlength=width)  # (C,)
    seen = torch.ones_like(wanted[0])  # (C,) one of each class, so that a class without auxiliary data has a chance too
    if auxiliary is not None:
        seen = seen + _widen(as_distribution(batches[1], width, torch.float64), width).sum(0)
    prior = seen / seen.sum()
    usable, unavailable = choose_metrics(comparison.metrics, "labels", None)
    if comparison.metrics is None and found.soft is None and truth.ndim == 1:  # hard labels: the counts say it all
        usable = {name: metric for name, metric in usable.items() if metric.per_batch}

    def values(estimate: LabelEstimate) -> tuple[dict[str, Tensor], Tensor | None]:
        counts = _widen(estimate.counts, width)
        result = {name: metric(counts, true_counts) for name, metric in usable.items() if metric.per_batch}
        by_sample = {name: metric for name, metric in usable.items() if not metric.per_batch}
        if not by_sample:
            return result, None
        rows = _widen(as_distribution(_rows(estimate), width, torch.float64), width)  # (n, C)
        assignment = assign(rows, wanted, order=1.0)
        return result | compare_samples(by_sample, rows, wanted, assignment), assignment

    drawn = _draw_counts(prior, len(wanted))  # (N, C)
    expected = {
        name: metric(drawn, true_counts.expand_as(drawn)).mean(0, keepdim=True)
        if metric.per_batch
        else metric(prior.expand_as(wanted), wanted)
        for name, metric in usable.items()
    }
    per_metric, assignment = values(found)
    nulls = {"prior": expected} | ({} if foreign is None else {"foreign": values(foreign)[0]})
    details: dict[str, Any] = {"chance": _chance(_widen(found.counts, width), true_counts, drawn)}
    replaced = comparison.exposure is not None and any(defense.replaces for defense in comparison.exposure.public.defenses)
    if not replaced and is_refuted(found, wanted):  # else the truth is not what the client trained on, and refutes nothing
        details["false_certificates"] = 1
    return Scores(surface="labels", per_metric=per_metric, nulls=nulls, assignment=assignment, unavailable=unavailable, details=details)


def is_refuted(found: LabelEstimate, targets: Tensor) -> bool:
    """Whether the true targets (B, C) refute what an estimate proves: its counts, its soft labels, or the part of its counts it proves.

    A soft label is refuted by a distance above `LARGEST_CERTIFIED_ERROR` (L1).
    """
    width = targets.shape[1]
    true_counts = torch.bincount(targets.argmax(1), minlength=width)
    hard = bool((targets.amax(1) == 1).all())
    proved = found.details.get("proved")
    if hard and proved is not None and bool((_widen(proved.to(true_counts.device), width) > true_counts).any()):
        return True
    if not found.certified:
        return False
    if hard:
        return not torch.equal(_widen(found.counts, width), true_counts)
    if found.soft is None or len(found.soft) != len(targets):
        return True
    rows = _widen(found.soft.to(targets), width)
    partners = assign(rows, targets, order=1.0)
    return bool(((rows[partners] - targets).abs().sum(1) > LARGEST_CERTIFIED_ERROR).any())


def _chance(counts: Tensor, true_counts: Tensor, drawn: Tensor) -> float:
    """The probability that luck agrees as well as the estimate, by InsAcc: the larger of two p-values.

    Both tests keep the estimate, so that its bias does not matter. One draws the truth from the prior: knowing the prior is
    then no leak. The other permutes the estimate's classes at random: knowing how often labels repeat is then no leak either.
    Each p-value is (k + 1)/(N + 1), which is never 0.
    """
    accuracy = InstanceAccuracy()
    reached = accuracy(counts, true_counts) - 1e-12
    order = torch.rand(drawn.shape, generator=generator(0, "renamed classes", drawn.device), device=drawn.device).argsort(1)
    redrawn = accuracy(counts.expand_as(drawn), drawn) >= reached
    renamed = accuracy(counts[order], true_counts.expand_as(drawn)) >= reached
    return max((int(as_good.sum()) + 1) / (len(drawn) + 1) for as_good in (redrawn, renamed))


def _draw_counts(prior: Tensor, batch_size: int) -> Tensor:
    """Label counts of batches drawn from the prior (C,), the same in every run: (N, C)."""
    fewest, most = GUESSED_BATCHES
    draws = min(most, max(fewest, 2**24 // len(prior)))
    rng = generator(0, "label guesses", prior.device)
    labels = torch.multinomial(prior.expand(draws, -1), batch_size, replacement=True, generator=rng)  # (N, B)
    counts = torch.zeros(draws, len(prior), dtype=torch.int64, device=prior.device)
    return counts.scatter_add_(1, labels, torch.ones_like(labels))


def _rows(estimate: LabelEstimate) -> Tensor:
    return estimate.labels if estimate.soft is None else estimate.soft


def _classes(targets: Tensor) -> int:
    return targets.shape[1] if targets.ndim == 2 else int(targets.max()) + 1 if len(targets) else 0


def _widen(rows: Tensor, width: int) -> Tensor:
    """The rows, padded by zeros to `width` classes."""
    return pad(rows, (0, width - rows.shape[-1]))
