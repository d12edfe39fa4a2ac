"""Which vectors a layer of a model over texts received: a test against the row space of its gradient, with error bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from scipy.stats import beta
from torch import Tensor, nn

from dosimeter.client.training import FedAvg, sends_one_gradient
from dosimeter.engines.sample_share import training_of_one_client
from dosimeter.engines.subspace.distortion import distortion_of, unmodelled
from dosimeter.engines.tokens.span import Span, span_of
from dosimeter.interfaces import Exposure
from dosimeter.network.copies import deep_copy
from dosimeter.network.position_layers import PositionLayer, find_position_layers
from dosimeter.network.probing import received_at
from dosimeter.network.token_inputs import with_ids
from dosimeter.types import Refused

PASS = 6.0  # error bars that a vector of the span may be away from it
HELD_BYTES = 2**26  # of the vectors that are tested at once
MOST_MODELS = 6  # along the way of local steps, for the mini-batches of one pass
SCREENS = 32  # random directions outside of the span, in which a vector is looked at first
SCREEN = 0.05  # relative size in these directions, beyond which a vector is far from the span


@dataclass(frozen=True, kw_only=True)
class Level:
    """One layer, or several that receive the same vectors, with the span of their gradients."""

    layer: PositionLayer
    span: Span
    rows: int  # of the gradients together, the most vectors that they can span
    model: nn.Module
    later: tuple[nn.Module, ...]  # with weights between and after the client's local steps, the last ones last; none where it took one
    blank: Any

    def vectors(self, ids: Tensor, model: nn.Module | None = None) -> Tensor:
        """What the layer receives for texts (n, t), before the client's local steps unless a `model` is given: (n, t, d)."""
        return received_at(model or self.model, self.layer.name, with_ids(self.blank, ids))

    def drift(self, vectors: Tensor, ids: Tensor) -> Tensor:
        """How far the vectors (n, t, d) of texts move in the client's local steps, relative: (n, t)."""
        if not self.later:
            return torch.zeros_like(vectors[..., 0])
        return (self.vectors(ids, self.later[-1]) - vectors).norm(dim=-1) / vectors.norm(dim=-1)

    def ratios(self, ids: Tensor, positions: Sequence[int] | None = None) -> Tensor:
        """How many error bars each vector of texts (n, t) is away from the span; at some positions only: (n, t or fewer)."""
        return self.ratios_by_model(ids, positions).amin(-1)

    def ratios_by_model(self, ids: Tensor, positions: Sequence[int] | None = None) -> Tensor:
        """The same at the weights that were sent and at those of each later model: (n, k, 1 + models). A sample has its own steps."""
        chosen = list(range(ids.shape[1])) if positions is None else list(positions)
        return torch.cat([self._far(piece, chosen)[0] for piece in self._pieces(ids)])

    def told(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """How many of the first tokens of texts (n, t) their vectors tell (n,), within which distance vectors are the same (n,), and these.

        A last place that has an earlier place's vector tells nothing. So is a run of one token seen by attention without positions: the
        mean of equal vectors is the vector itself. The distance is relative, and that of the last place.
        """
        parts = zip(*(self._told(piece) for piece in self._pieces(ids)))
        told, reached, vectors = (torch.cat(part) for part in parts)
        return told, reached, vectors

    def _told(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        seen = self.vectors(ids)
        bars = self.span.distances(seen.flatten(0, 1))[1].reshape(ids.shape) * PASS + self.drift(seen, ids)  # (n, t)
        vectors = seen.double()
        gaps = torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist") / vectors.norm(dim=2)[..., None]  # (n, t, t)
        own = ~(gaps <= bars[..., None]).tril(-1).any(2)
        return (own * torch.arange(1, ids.shape[1] + 1, device=ids.device)).amax(1), bars[:, -1], vectors

    def distances(self, ids: Tensor, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The relative distances from the span, and the same in error bars: (n, k) each."""
        found = [self._far(piece, list(positions)) for piece in self._pieces(ids)]
        return torch.cat([far.amin(-1) for _, far in found]), torch.cat([ratio.amin(-1) for ratio, _ in found])

    def _pieces(self, ids: Tensor) -> tuple[Tensor, ...]:
        return ids.split(max(1, HELD_BYTES // (ids.shape[1] * self.span.columns * 8)))

    def _far(self, ids: Tensor, positions: list[int]) -> tuple[Tensor, Tensor]:
        """The distances by model, in error bars and relative. A sample enters the update with its vector at its own steps."""
        vectors = self.vectors(ids)
        far, bars = self.span.distances(vectors[:, positions].flatten(0, 1))
        bars = bars + self.drift(vectors, ids)[:, positions].flatten().to(bars) / PASS  # at worst the drift itself is left over
        later = [self.span.distances(self.vectors(ids, model)[:, positions].flatten(0, 1))[0] for model in self.later]
        every = torch.stack([far, *later], -1).reshape(len(ids), len(positions), -1)
        return every / bars.reshape(len(ids), len(positions), 1), every

    def repeated(self, tokens: Tensor, length: int, rng: torch.Generator) -> Tensor:
        """The ratios of tokens (n,) at each place of a text, for a layer whose vectors depend on token and place alone: (n, length).

        A text of one token, repeated, shows the token's vectors at all places. A first look in a few directions outside of the span
        spares the exact test of vectors that are far; these have an infinite ratio.
        """
        screens = self._screens(rng)
        result = torch.full((len(tokens), length), torch.inf, dtype=torch.float64, device=tokens.device)
        at_once = max(1, HELD_BYTES // (length * self.span.columns * 8))
        for first in range(0, len(tokens), at_once):
            ids = tokens[first : first + at_once, None].expand(-1, length)
            vectors = self.vectors(ids)
            seen = (vectors @ screens.to(vectors)).norm(dim=-1) / vectors.norm(dim=-1)
            moved = self.drift(vectors, ids)
            near = (seen < SCREEN + 2 * moved).nonzero()
            if len(near):
                flat = vectors[near[:, 0], near[:, 1]].double()
                far, bars = self.span.distances(flat)
                bars = bars + moved[near[:, 0], near[:, 1]].double() / PASS
                result[first + near[:, 0], near[:, 1]] = far / bars
        return result

    def _screens(self, rng: torch.Generator) -> Tensor:
        """Random orthonormal directions outside of the span, scaled so that a random vector keeps its length: (d, k)."""
        free = self.span.columns - self.span.rank
        drawn = torch.randn(self.span.columns, min(SCREENS, free), generator=rng, dtype=torch.float64, device=rng.device)
        right = self.span.right
        drawn = drawn.to(right.device)
        outside = torch.linalg.qr(drawn - right.T @ (right @ drawn)).Q
        if self.span.noise_is_large:
            return outside * 0  # nothing is screened: all vectors get the exact test
        return outside * (free / outside.shape[1]) ** 0.5

    def chance(self, bar: float, candidates: int) -> float:
        """A bound on the chance that any of `candidates` random vectors lies within `PASS` bars of the span."""
        free, rank = self.span.columns - self.span.rank, max(self.span.rank, 1)
        return min(1.0, candidates * float(beta.cdf(min((PASS * bar) ** 2, 1.0), free / 2, rank / 2)))


def find_levels(exposure: Exposure) -> tuple[Level | None, list[Level], str]:
    """The level of tokens, the levels of contexts in run order, and why there is none of the first kind."""
    public = exposure.public
    layers = [layer for layer in find_position_layers(exposure.model, public.blank) if layer.rows(exposure.update) is not None]
    groups: dict[int, list[PositionLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.group, []).append(layer)
    later = _later_models(exposure)
    first = next((group for group in groups.values() if group[0].reach == "token"), None)
    if first is None:
        return None, [], "no layer whose gradient was sent receives vectors that depend on one token and its place alone"
    contexts = [group for group in groups.values() if group[0].reach != "token"]
    build = lambda group: _level(exposure, group, later)  # noqa: E731
    level = build(first)
    if level.span.rank == 0:
        sent = [change for layer in first if (change := layer.rows(exposure.update)) is not None]
        drowned = f"no direction of the gradient of {first[0].name} stands above the noise"
        zero = f"the gradient of {first[0].name} is zero, as that of a fresh LoRA adapter, whose second matrix is zero"
        return None, [], drowned if any(bool(change.any()) for change in sent) else zero
    return level, [build(group) for group in contexts[:3]], ""


def _level(exposure: Exposure, group: list[PositionLayer], later: tuple[nn.Module, ...]) -> Level:
    rows = torch.cat([change for layer in group if (change := layer.rows(exposure.update)) is not None])
    unit = torch.finfo(rows.dtype).eps / 2
    noise = rounding = 0.0
    for layer in group:
        distortion = distortion_of(exposure.update[layer.parameter], exposure.public)
        noise = max(noise, 0.0 if distortion is None else distortion.noise)
    training = training_of_one_client(exposure.public.training)
    if isinstance(training, FedAvg):  # a difference of weights has their rounding
        weights = dict(exposure.model.named_parameters())
        squares = [_rounding(weights[layer.parameter].detach()).square().mean() for layer in group]
        steps = training.local_steps(exposure.public.batch_size or 1)
        rounding = float(max(squares)) ** 0.5 * steps**0.5 / (training.learning_rate * steps)
    span = span_of(rows, unit, declared=math.hypot(noise, rounding))
    span = replace(span, noise_is_large=noise > 0)
    return Level(layer=group[0], span=span, rows=len(rows), model=exposure.model, later=later, blank=exposure.public.blank)


def _rounding(weights: Tensor) -> Tensor:
    """The standard deviation of the rounding of each weight: a unit in its last place, over √12."""
    digits = -math.log2(torch.finfo(weights.dtype).eps)
    return torch.ldexp(torch.ones_like(weights), torch.frexp(weights).exponent - 1 - digits) / math.sqrt(12)


def _later_models(exposure: Exposure) -> tuple[nn.Module, ...]:
    """The model at weights between and after the client's local steps, taken to lie on a line; none where it takes one step.

    A sample enters the update with its vectors at the steps that its mini-batch takes, on average in the middle of these steps.
    """
    training = training_of_one_client(exposure.public.training)
    if sends_one_gradient(exposure.public.training) or not isinstance(training, FedAvg):
        return ()
    steps = training.local_steps(exposure.public.batch_size or 1)
    models = []
    for share in shares_of_steps(steps, _steps_of_a_pass(training, exposure.public.batch_size)):
        model = deep_copy(exposure.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name in exposure.update:
                    parameter.sub_(share * training.learning_rate * steps * exposure.update[name].to(parameter))
        models.append(model)
    return tuple(models)


def shares_of_steps(steps: int, in_a_pass: int) -> list[float]:
    """Where on the way the mini-batches of a pass over the data have their mean step, the last step, and the end.

    Of many mini-batches a few are taken, evenly spread.
    """
    means = [sum(range(first, steps, in_a_pass)) / len(range(first, steps, in_a_pass)) / steps for first in range(min(in_a_pass, steps))]
    chosen = {means[round(place * (len(means) - 1) / (MOST_MODELS - 1))] for place in range(MOST_MODELS)}
    return sorted((chosen | {(steps - 1) / steps, 1.0}) - {0.0})


def _steps_of_a_pass(training: FedAvg, batch_size: int | None) -> int:
    if training.mini_batch is None or batch_size is None:
        return 1
    return math.ceil(math.ceil(batch_size / training.mini_batch) / training.accumulate)


def doubt_of(exposure: Exposure, level: Level) -> str:
    """Why nothing that lies in the span is certified, "" where it is."""
    public = exposure.public
    change = exposure.update[level.layer.parameter]
    if names := unmodelled(change, public):
        return f"{names} may change the gradient's entries, and does not say how"
    distortion = distortion_of(change, public)
    if distortion is not None and not bool(distortion.live.all()):
        return "entries of the gradient were emptied or rounded by a defense"
    training = training_of_one_client(public.training)
    if isinstance(training, FedAvg) and (training.autocast is not None or training.decays):
        return "half precision or weight decay in the client's steps adds errors of unknown size"
    if isinstance(training, FedAvg) and not sends_one_gradient(public.training):
        missing = [name for name, p in exposure.model.named_parameters() if p.requires_grad and name not in exposure.update]
        if missing:
            return f"the client trains {missing[0]} in its local steps and does not send it, so that the vectors' drift is unknown"
    return ""


def require_rows(level: Level) -> None:
    """Refuse a span that its gradient had no rows for, in which no vector of the batch lies: mixtures of more vectors than rows."""
    if level.span.rank >= level.rows:
        raise Refused(
            f"dager needs no more token vectors than the gradient of {level.layer.name} has rows, {level.rows}, as the rank of LoRA; "
            f"all rows are used and no vector lies in their span, so that the batch has more"
        )


def require_room(level: Level) -> None:
    """Refuse a span that leaves no room for a vector outside of it."""
    if level.span.full:
        raise Refused(
            f"dager needs fewer token vectors than the width of {level.layer.name}, {level.span.columns}, so that absent tokens show; "
            f"its gradient has rank {level.span.rank}"
        )
