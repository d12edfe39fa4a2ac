"""Feature matching: a guess should also give the last layer the inputs that were recovered from its gradient."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Generator, Tensor, nn

from dosimeter.engines.matching.distances import Distance
from dosimeter.engines.matching.priors import Prior, Seen
from dosimeter.engines.needs import check_needs
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.randomness import generator
from dosimeter.registry import FEATURES
from dosimeter.types import FeatureEstimate, LabelEstimate, Reconstruction, Refused


@dataclass(frozen=True, kw_only=True)
class FeatureMatch(Prior):
    """β · D(f, f*): the third term of soft-labels Eq. (8), for the samples whose feature is known."""

    head: str  # the module whose input the features are
    features: Tensor  # (n, H)
    slots: Tensor  # (n,) the guessed sample that each belongs to
    distance: Distance

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        received = seen[self.head][self.slots]
        wanted = self.features.to(received)
        return self.distance(list(received), list(wanted)) / len(self.slots)

    def modules_to_watch(self, model: nn.Module) -> tuple[str, ...]:
        return (self.head,)


@dataclass(frozen=True)
class FeatureTerm:
    """What features add to a recipe: nothing, or the term, the head's weight, and a sentence for the user."""

    priors: tuple[FeatureMatch, ...] = ()
    head_parameters: tuple[str, ...] = ()
    note: str = ""

    def layer_weights(self, head_weight: float | None) -> dict[str, float] | None:
        """α of Eq. (8), the weight of the head's own gradient. By default it is 0, since the features replace that gradient."""
        if not self.priors:
            return None
        return dict.fromkeys(self.head_parameters, 0.0 if head_weight is None else head_weight)

    def with_note(self, found: Reconstruction) -> Reconstruction:
        return dataclasses.replace(found, message="; ".join(part for part in (found.message, self.note) if part))


def feature_term(
    method: str | None, exposure: Exposure, labels: LabelEstimate | None, rng: Generator, *, weight: float, distance: Distance
) -> FeatureTerm:
    """Recover features with `method` and make a term of the certified ones. If there are none, the note says so.

    The recovery draws from a stream of its own, so that asking for features does not move the attack's starting point.
    """
    if method is None:
        return FeatureTerm()
    try:
        head = find_head(exposure)
        features, slots = _recover(method, exposure, labels, rng)
    except Refused as refusal:
        return FeatureTerm(note=f"no features to match: {refusal}")
    prefix = f"{head.name}." if head.name else ""
    prior = FeatureMatch(weight=weight, head=head.name, features=features.detach(), slots=slots, distance=distance)
    return FeatureTerm((prior,), (prefix + "weight", prefix + "bias"), f"{len(slots)} certified features of {method} matched")


def _recover(method: str, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> tuple[Tensor, Tensor]:
    """Certified features (n, H) and the guessed samples (n,) that they belong to; refused where there are none."""
    if method == "labels":
        if labels is None or "features" not in labels.details or not labels.certified:
            raise Refused('features="labels" needs a label recovery that certifies its answer and gives features, such as soft_scalar')
        features = labels.details["features"]
        return features, torch.arange(len(features), device=features.device)
    own = generator(rng.initial_seed(), f"features {method}", rng.device)
    recovery = FEATURES.build(method)
    check_needs(recovery, exposure, labels)
    estimate = recovery(exposure, labels, own)
    certified = estimate.certified.nonzero()[:, 0]
    slots, rows = _slots(estimate, certified, labels)
    if len(rows) == 0:
        raise Refused(f"{method} certified {len(certified)} features, none of a label in the batch")
    return estimate.features[rows], slots


def _slots(estimate: FeatureEstimate, certified: Tensor, labels: LabelEstimate | None) -> tuple[Tensor, Tensor]:
    """Pair features with guessed samples of their label, in order: the slots and the rows of the estimate, (n,) each."""
    device = estimate.features.device
    if labels is None:
        return torch.arange(len(certified), device=device), certified
    known = labels.labels if labels.soft is None else labels.soft.argmax(1)
    free = {int(c): (known == c).nonzero()[:, 0].tolist() for c in known.unique()}
    pairs = []
    for row in certified.tolist():
        waiting = free.get(int(estimate.labels[row]), [])
        if waiting:
            pairs.append((waiting.pop(0), row))
    paired = torch.tensor(pairs, dtype=torch.int64, device=device).reshape(-1, 2)
    return paired[:, 0], paired[:, 1]
