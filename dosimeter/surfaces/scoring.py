"""Where the truth returns: every recovery is matched one to one with the private batch, scored, and set beside its nulls."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from dosimeter.client.losses import as_distribution
from dosimeter.interfaces import Exposure, Metric
from dosimeter.metrics.insacc import InstanceAccuracy
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.normalization import to_pixels
from dosimeter.randomness import generator
from dosimeter.registry import METRICS
from dosimeter.surfaces.assignment import assign, distances
from dosimeter.surfaces.certificates import false_certificates
from dosimeter.types import Batch, FeatureEstimate, LabelEstimate, Normalization, Reconstruction

PIECE = 256  # auxiliary samples that go through the model at a time
GUESSES = (1_000, 10_000)  # label batches drawn for the null of label counts, fewer where there are many classes
OUTSIDE = 1e-3  # how far past [0, 1] a true pixel may lie for rounding


@dataclass(frozen=True, kw_only=True, eq=False)
class Scores(Mapping[str, Tensor]):
    """Metric name -> one value a sample, in the truth's order, with the same of every null beside.

    A truth sample without a partner (fewer were recovered, or what was recovered is not finite) has assignment −1 and nan in
    every metric. It is a miss, and `statistics` ranks a miss below every score.
    """

    surface: str
    per_metric: Mapping[str, Tensor]  # (B,), or (1,) where a metric compares label counts
    nulls: dict[str, dict[str, Tensor]]  # null name -> metric name -> as above
    assignment: Tensor | None  # (B,) index of the recovered sample or −1; None where only label counts were compared
    unavailable: dict[str, str] = field(default_factory=dict)  # metric name -> why it could not be computed
    warnings: tuple[str, ...] = ()  # what makes the values mean less than they seem to
    details: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Tensor:
        return self.per_metric[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.per_metric)

    def __len__(self) -> int:
        return len(self.per_metric)

    @property
    def misses(self) -> int:
        """How many truth samples got no partner."""
        return 0 if self.assignment is None else int((self.assignment < 0).sum())


def score(
    found: Reconstruction | FeatureEstimate | LabelEstimate,
    truth: Batch,
    *,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    foreign: Reconstruction | FeatureEstimate | LabelEstimate | None = None,
    exposure: Exposure | None = None,
    classes: int | None = None,
    metrics: Sequence[str | Metric] | None = None,
) -> Scores:
    """Score whatever was recovered against the private batch, by every metric of its surface or by `metrics`.

    Nulls, what the same score is worth without the gradient:
    - inputs and features: `mean`, the mean of the auxiliary data; `nearest`, the auxiliary sample nearest to each truth (it
      knows the truth, so it is a hard one to beat); without auxiliary data `gray`, the mid-gray image, or `zero`, the zero vector;
    - labels: `prior`, batches of labels drawn at random from the auxiliary label distribution (uniform without);
    - all: `foreign`, where given: what the same method recovered from somebody else's gradient, matched in the same way;
    - inputs: those of `found.nulls`, what a method with a prior of its own draws without the gradient, matched in the same way.
    `normalization` overrides the one in `found`; `auxiliary` defaults to what `exposure` grants; features need `exposure`, since
    the true ones come from its model; `classes` sets the length of the count vectors where the estimate's is shorter.
    """
    if not isinstance(truth, Batch) or len(truth.inputs) == 0 or len(truth.inputs) != len(truth.targets):
        raise ValueError("truth: expected a Batch of at least one sample with one target each")
    if auxiliary is None and exposure is not None:
        auxiliary = exposure.auxiliary
    if auxiliary is not None and len(auxiliary.inputs) == 0:
        raise ValueError("auxiliary: expected at least one sample, or None")
    if isinstance(found, Reconstruction) and isinstance(foreign, Reconstruction | None):
        return _score_inputs(found, truth, normalization, auxiliary, foreign, metrics)
    if isinstance(found, FeatureEstimate) and isinstance(foreign, FeatureEstimate | None):
        if exposure is None:
            raise ValueError("exposure: scoring features needs the exposure they were recovered from, whose model gives the true ones")
        return _score_features(found, truth, auxiliary, foreign, exposure, metrics)
    if isinstance(found, LabelEstimate) and isinstance(foreign, LabelEstimate | None):
        return _score_labels(found, truth, auxiliary, foreign, classes, metrics)
    if isinstance(found, Reconstruction | FeatureEstimate | LabelEstimate):
        raise TypeError(f"foreign: expected a {type(found).__name__} like what is scored, got {type(foreign).__name__}")
    raise TypeError(f"found: expected a Reconstruction, a FeatureEstimate or a LabelEstimate, got {type(found).__name__}")


def _score_inputs(
    found: Reconstruction,
    truth: Batch,
    normalization: Normalization | None,
    auxiliary: Batch | None,
    foreign: Reconstruction | None,
    metrics: Sequence[str | Metric] | None,
) -> Scores:
    def pixels(inputs: Tensor, path: str, scale: Normalization) -> Tensor:
        if inputs.shape[1:] != truth.inputs.shape[1:]:
            raise ValueError(f"{path}: expected samples of shape {tuple(truth.inputs.shape[1:])}, got {tuple(inputs.shape[1:])}")
        if len(scale.mean) != len(scale.std) or len(scale.mean) not in (1, inputs.shape[1]):
            raise ValueError(f"normalization: expected 1 or {inputs.shape[1]} means and stds, got {scale}")
        precision = torch.promote_types(found.inputs.dtype, torch.float32)
        return to_pixels(inputs.detach().to(found.inputs.device, precision), scale)

    scale = normalization or found.normalization
    wanted = pixels(truth.inputs, "truth.inputs", scale)
    scores = _score_samples(
        "inputs",
        recovered=pixels(found.inputs, "found.inputs", scale),
        truth=wanted,
        auxiliary=None if auxiliary is None else pixels(auxiliary.inputs, "auxiliary.inputs", scale),
        foreign=None if foreign is None else pixels(foreign.inputs, "foreign.inputs", normalization or foreign.normalization),
        own={name: pixels(inputs, f"found.nulls[{name!r}]", scale) for name, inputs in found.nulls.items()},
        blind=("gray", torch.full_like(wanted, 0.5)),
        metrics=metrics,
    )
    if bool((wanted < -OUTSIDE).any()) or bool((wanted > 1 + OUTSIDE).any()):
        warning = f"true pixels reach from {wanted.min():.3g} to {wanted.max():.3g}, but psnr, ssim and lpips take them to lie in [0, 1]"
        scores = replace(scores, warnings=(*scores.warnings, f"{warning}: pass the normalization"))
    return scores


def _score_features(
    found: FeatureEstimate,
    truth: Batch,
    auxiliary: Batch | None,
    foreign: FeatureEstimate | None,
    exposure: Exposure,
    metrics: Sequence[str | Metric] | None,
) -> Scores:
    head = find_head(exposure).name
    parameter = next(exposure.model.parameters())

    def features_of(inputs: Tensor) -> Tensor:
        return input_of(exposure.model, head, inputs.to(parameter.device, parameter.dtype))

    actual = features_of(truth.inputs)  # (B, H), the whole batch at once, as batch norm in train mode saw it
    for path, estimate in (("found", found), ("foreign", foreign)):
        if estimate is not None and estimate.features.shape[1:] != actual.shape[1:]:
            got = tuple(estimate.features.shape)
            raise ValueError(f"{path}.features: expected (n, {actual.shape[1]}) as the model's last layer takes, got {got}")
    public = None
    if auxiliary is not None:
        pieces = auxiliary.inputs.tensor_split(-(-len(auxiliary.inputs) // PIECE))  # of nearly equal size
        public = torch.cat([features_of(piece) for piece in pieces]).to(torch.float64)
    scores = _score_samples(
        "features",
        recovered=found.features.detach().to(actual.device, torch.float64),
        truth=actual.to(torch.float64),
        auxiliary=public,
        foreign=None if foreign is None else foreign.features.detach().to(actual.device, torch.float64),
        blind=("zero", torch.zeros_like(actual, dtype=torch.float64)),
        metrics=metrics,
    )
    dropouts = [module for module in exposure.model.modules() if isinstance(module, nn.modules.dropout._DropoutNd)]
    dropping = any(module.training and module.p > 0 for module in dropouts)
    if dropping:
        warning = "the model drops units at random in train mode, so that the client's own features cannot be computed again"
        blank = dict.fromkeys(scores.per_metric, warning)
        scores = replace(scores, per_metric={}, nulls={}, unavailable=scores.unavailable | blank, warnings=(*scores.warnings, warning))
    assert scores.assignment is not None
    false = false_certificates(found, actual, truth.targets, scores.assignment)
    counts = {"recovered": len(found.features), "certified": int(found.certified.sum())}
    replaced = any(defense.replaces for defense in exposure.public.defenses)
    if not dropping and not replaced:  # else the truth is not what the client trained on, and refutes nothing
        counts["false_certificates"] = int(false.sum())
    return replace(scores, details=counts)


def _score_labels(
    found: LabelEstimate,
    truth: Batch,
    auxiliary: Batch | None,
    foreign: LabelEstimate | None,
    classes: int | None,
    metrics: Sequence[str | Metric] | None,
) -> Scores:
    device = found.counts.device
    batches = [batch.targets.to(device) for batch in (truth, auxiliary) if batch is not None]
    estimates = [estimate for estimate in (found, foreign) if estimate is not None]
    narrow = [len(estimate.counts) for estimate in estimates] + [_classes(_rows(estimate)) for estimate in estimates]
    width = max(2, classes or 0, *narrow, *map(_classes, batches))
    wanted = _widen(as_distribution(batches[0], width, torch.float64), width)  # (B, C)
    true_counts = torch.bincount(wanted.argmax(1), minlength=width)  # (C,)
    seen = torch.ones_like(wanted[0])  # (C,) one of each, so that a class that the auxiliary data lack is not impossible
    if auxiliary is not None:
        seen = seen + _widen(as_distribution(batches[1], width, torch.float64), width).sum(0)
    prior = seen / seen.sum()
    usable, unavailable = _choose(metrics, "labels", None)
    if metrics is None and found.soft is None and truth.targets.ndim == 1:  # hard labels: the counts say it all
        usable = {name: metric for name, metric in usable.items() if metric.per_batch}

    def values(estimate: LabelEstimate) -> tuple[dict[str, Tensor], Tensor | None]:
        counts = _widen(estimate.counts, width)
        result = {name: metric(counts, true_counts) for name, metric in usable.items() if metric.per_batch}
        by_sample = {name: metric for name, metric in usable.items() if not metric.per_batch}
        if not by_sample:
            return result, None
        rows = _widen(as_distribution(_rows(estimate), width, torch.float64), width)  # (n, C)
        assignment = assign(rows, wanted, order=1.0)
        return result | _compare(by_sample, rows, wanted, assignment), assignment

    drawn = _drawn_counts(prior, len(wanted))  # (N, C)
    expected = {
        name: metric(drawn, true_counts.expand_as(drawn)).mean(0, keepdim=True)
        if metric.per_batch
        else metric(prior.expand_as(wanted), wanted)
        for name, metric in usable.items()
    }
    per_metric, assignment = values(found)
    nulls = {"prior": expected} | ({} if foreign is None else {"foreign": values(foreign)[0]})
    details = {"chance": _chance(_widen(found.counts, width), true_counts, drawn)}
    return Scores(surface="labels", per_metric=per_metric, nulls=nulls, assignment=assignment, unavailable=unavailable, details=details)


def _chance(counts: Tensor, true_counts: Tensor, drawn: Tensor) -> float:
    """How often luck agrees as well as the estimate does, by InsAcc: the larger of two p-values.

    Both keep the estimate, whose bias then does not matter. One draws the truth anew from the prior, so that knowing the
    prior is no leak; the other renames the estimate's classes at random, so that knowing how labels repeat (all of one
    class, each class once) is none either: only which classes they are counts. (k + 1)/(N + 1) each, which is never 0.
    """
    accuracy = InstanceAccuracy()
    reached = accuracy(counts, true_counts) - 1e-12
    order = torch.rand(drawn.shape, generator=generator(0, "renamed classes", drawn.device), device=drawn.device).argsort(1)
    redrawn = accuracy(counts.expand_as(drawn), drawn) >= reached
    renamed = accuracy(counts[order], true_counts.expand_as(drawn)) >= reached
    return max((int(as_good.sum()) + 1) / (len(drawn) + 1) for as_good in (redrawn, renamed))


def _score_samples(
    surface: str,
    *,
    recovered: Tensor,
    truth: Tensor,
    auxiliary: Tensor | None,
    foreign: Tensor | None,
    blind: tuple[str, Tensor],
    metrics: Sequence[str | Metric] | None,
    own: Mapping[str, Tensor] | None = None,
) -> Scores:
    """Match, compare, and do the same with what needs no gradient.

    `blind` is the null where there is no auxiliary data, `own` are those that the method itself drew.
    """
    if not truth.isfinite().all():
        raise ValueError(f"truth: has NaN or infinite {surface}, against which nothing can be scored")
    usable, unavailable = _choose(metrics, surface, tuple(truth.shape[1:]))
    assignment = assign(recovered, truth)
    in_order = torch.arange(len(truth), device=truth.device)
    warnings: tuple[str, ...] = ()
    if auxiliary is None:
        nulls = {blind[0]: _compare(usable, blind[1], truth, in_order)}
    else:
        nearest = auxiliary[distances(truth, auxiliary).argmin(1)]
        nulls = {
            "mean": _compare(usable, auxiliary.mean(0, keepdim=True).expand_as(truth), truth, in_order),
            "nearest": _compare(usable, nearest, truth, in_order),
        }
        shared = int((nearest == truth).flatten(1).all(1).sum())
        if shared:
            warnings = (f"{shared} of {len(truth)} private samples are in the auxiliary data too, so that their nearest null is exact",)
    if foreign is not None:
        nulls["foreign"] = _compare(usable, foreign, truth, assign(foreign, truth))
    for name, drawn in (own or {}).items():
        nulls[name] = _compare(usable, drawn, truth, assign(drawn, truth))
    per_metric = _compare(usable, recovered, truth, assignment)
    return Scores(surface=surface, per_metric=per_metric, nulls=nulls, assignment=assignment, unavailable=unavailable, warnings=warnings)


def _choose(
    metrics: Sequence[str | Metric] | None, surface: str, shape: tuple[int, ...] | None
) -> tuple[dict[str, Metric], dict[str, str]]:
    """The metrics that can be computed here, and why the others cannot."""
    chosen = [METRICS.resolve(metric) for metric in (METRICS.names() if metrics is None else metrics)]
    for metric in chosen:
        if metrics is not None and metric.surface != surface:
            raise ValueError(f"metrics: {metric.name} scores {metric.surface}, but what was recovered are {surface}")
    chosen = [metric for metric in chosen if metric.surface == surface]
    reasons = {metric.name: metric.unavailable(shape) for metric in chosen}
    unavailable = {name: reason for name, reason in reasons.items() if reason is not None}
    return {metric.name: metric for metric in chosen if metric.name not in unavailable}, unavailable


def _compare(metrics: Mapping[str, Metric], recovered: Tensor, truth: Tensor, assignment: Tensor) -> dict[str, Tensor]:
    """Each metric of each truth sample and its partner; nan without one: (B,)."""
    matched = assignment >= 0
    result = {name: torch.full((len(truth),), torch.nan, dtype=torch.float64, device=truth.device) for name in metrics}
    if matched.any():
        partners, wanted = recovered[assignment[matched]], truth[matched]
        for name, metric in metrics.items():
            result[name][matched] = metric(partners, wanted).to(torch.float64)
    return result


def _drawn_counts(prior: Tensor, batch_size: int) -> Tensor:
    """Counts of batches whose labels are drawn independently from the prior (C,), always the same ones: (N, C)."""
    fewest, most = GUESSES
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
    """Zeros for the classes that a narrower vector leaves out."""
    return pad(rows, (0, width - rows.shape[-1]))
