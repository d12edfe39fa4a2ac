"""Exact batches of texts from the row spaces of attention's gradients."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from dosimeter.engines.premises import premises_of
from dosimeter.engines.tokens.levels import PASS, Level, doubt_of, find_levels, require_room, require_rows
from dosimeter.engines.tokens.texts import FoundTexts, follow, search
from dosimeter.interfaces import Exposure, TokenRecovery
from dosimeter.network.operations import FLOPS_A_SECOND, count_flops
from dosimeter.network.probing import output_of, random_states, random_states_restored
from dosimeter.network.token_inputs import find_token_embedding
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.registry import TOKENS
from dosimeter.types import NamedInputs, Outcome, Refused, TokenEstimate

LARGEST_CHANCE = 1e-6  # that any token of the vocabulary is certified by accident
CLEAR_MARGIN = 3.0  # the same for contexts: no vector that fails may be nearer than so many times what passes
CLEAR = 4.0  # error bars, beyond those that pass, in which no vector may lie, so that passing is no matter of degree


@TOKENS.register("dager")
@dataclass(frozen=True, kw_only=True)
class Dager(TokenRecovery):
    """Tests each token of the vocabulary at each place against the span of attention's gradient, then whole texts against the next layer's.

    Petrov et al., "DAGER: Exact Gradient Inversion for Large Language Models", NeurIPS 2024: Theorem 3.1, Algorithms 1 and 2. The
    gradient of a linear layer, Σ δ xᵀ, has the vectors x as its row space where they are fewer than the layer is wide. The vectors of
    the first layer depend on one token and its place, those of the next on its context.
    Departures: the rank is read at the noise's edge, and each vector's distance is measured in error bars that follow from the
    spectrum, in place of tolerances set by hand, so that a token is certified. The texts of an encoder are searched place by place,
    in place of an enumeration. Behind local steps the error bars hold the drift of the vectors, which the weights that were sent tell.
    LoRA's first matrices are layers as any other.
    """

    quick: ClassVar = {"tries": 200_000, "search_seconds": 60.0}

    sequences: bool = True  # also join the tokens to texts
    tries: PositiveInt = 2_000_000  # of a text
    search_seconds: PositiveFloat = 3600.0  # for these tries, of one core by a count of operations; a GPU has no such limit

    def __call__(self, exposure: Exposure, rng: Generator) -> TokenEstimate:
        _refuse_randomness(exposure)
        level, contexts, why = find_levels(exposure)
        if level is None:
            raise Refused(f"dager: {why}")
        require_room(level)
        length = exposure.public.input_shape[0]
        vocabulary = find_token_embedding(exposure.model, exposure.public.blank).vocabulary
        device = next(iter(exposure.update.values())).device
        ratios = level.repeated(torch.arange(vocabulary, device=device), length, rng)  # (V, T)
        near = ratios <= PASS
        found = frozenset(near.any(1).nonzero().flatten().tolist())
        if not found:
            require_rows(level)
        nothing = FoundTexts([], 0.0)
        texts, message = self._texts(exposure, contexts, near, rng) if self.sequences and found else (nothing, "")
        if not found:
            message = f"no token's vector lies in the span of the {level.span.rank} directions that stand above the noise"
        return _estimate(exposure, level, ratios, found, texts, message)

    def _texts(self, exposure: Exposure, contexts: list[Level], near: Tensor, rng: Generator) -> tuple[FoundTexts, str]:
        """The texts, and why there are none or no more."""
        usable = [context for context in contexts if context.span.rank and not context.span.full]
        if not usable:
            return FoundTexts(
                [], 0.0
            ), "no layer behind the first attention has room for all contexts, so that tokens are not joined to texts"
        most = max(context.span.rank for context in usable)  # a layer with fewer, as LoRA's second matrix, does not hold all contexts
        whole = [context for context in usable if context.span.rank == most]
        context = whole[min(1, len(whole) - 1)]  # what follows the first shortcut depends on token and context by no linear map
        choices = [near[:, place].nonzero().flatten() for place in range(near.shape[1])]
        size, tries = exposure.public.batch_size, self._tries(context, near.shape[1])
        if context.layer.reach == "earlier":
            texts = follow(context, choices, size, tries=tries)
        else:
            padded = isinstance(exposure.public.blank, NamedInputs)  # only a mask makes texts of one batch differ in length
            texts = search(context, choices, size, shorter=padded, tries=tries, rng=rng)
        return texts, f"the search for texts ended after {tries:,} tries; tries= and search_seconds= allow more" if texts.cut else ""

    def _tries(self, context: Level, length: int) -> int:
        """As many tries as both limits allow."""
        device = context.span.right.device
        if device.type != "cpu":
            return self.tries
        text = torch.zeros(1, length, dtype=torch.int64, device=device)
        each = count_flops(lambda: context.vectors(text)) / FLOPS_A_SECOND
        return min(self.tries, max(1, int(self.search_seconds / each))) if each else self.tries


def _estimate(exposure: Exposure, level: Level, ratios: Tensor, found: frozenset[int], joined: FoundTexts, message: str) -> TokenEstimate:
    doubt = doubt_of(exposure, level)
    passing = ratios[ratios <= PASS]
    between = int(((ratios > PASS) & (ratios <= PASS + CLEAR)).sum())
    bar = _largest_bar(level, ratios)
    chance = level.chance(bar, ratios.numel())
    if not doubt and between:
        doubt = f"{between} vectors lie at the edge of what noise explains"
    if not doubt and chance > LARGEST_CHANCE:
        doubt = f"a vector lies as near to the span by accident with a chance of {chance:.2g}"
    certified = frozenset() if doubt else found - _twins(level, ratios)
    texts = joined.texts
    clear = [min(joined.margin, text.margin) >= CLEAR_MARGIN for text in texts]
    sure = tuple(text.passes and text.told_whole and not doubt and far for text, far in zip(texts, clear))
    premises = (
        *premises_of(exposure.public, size_matters=False),
        "a token that does not occur has a vector outside of the span of those that do",
    )
    notes = [f"guesses only: {doubt}"] if doubt else []
    if not doubt and not all(sure):
        notes.append(f"{sure.count(False)} of {len(texts)} texts are guesses: a place of theirs does not pass, or other texts pass as well")
    return TokenEstimate(
        tokens=found,
        certified=certified,
        error_bars=dict.fromkeys(certified, chance),
        sequences=tuple(text.tokens for text in texts),
        certified_sequences=sure,
        premises=premises if certified else (),
        message="; ".join([*notes, *filter(None, [message])]),
        outcome=Outcome.COMPLETED if texts and all(sure) else Outcome.PARTIAL,
        details={
            "layer": level.layer.name,
            "rank": level.span.rank,
            "width": level.span.columns,
            "pairs": len(passing),
            "vocabulary": len(ratios),
        },
    )


def _largest_bar(level: Level, ratios: Tensor) -> float:
    """The largest error bar of the vectors that pass, relative."""
    tokens, places = (ratios <= PASS).nonzero(as_tuple=True)
    if len(tokens) == 0:
        return 0.0
    largest = 0.0
    for rows in torch.arange(len(tokens), device=tokens.device).split(4096):
        ids = tokens[rows, None].expand(-1, ratios.shape[1])
        whole = level.vectors(ids)
        vectors, drift = whole[torch.arange(len(rows)), places[rows]], level.drift(whole, ids)
        bars = level.span.distances(vectors)[1] + drift[torch.arange(len(rows)), places[rows]].to(vectors.dtype).double() / PASS
        largest = max(largest, float(bars.max()))
    return largest


def _twins(level: Level, ratios: Tensor) -> frozenset[int]:
    """Tokens that pass beside another one with the same vector, so that the span does not tell which of them occurs."""
    twins: set[int] = set()
    for place in range(ratios.shape[1]):
        tokens = (ratios[:, place] <= PASS).nonzero().flatten()
        if len(tokens) < 2:
            continue
        vectors = level.vectors(tokens[:, None].expand(-1, ratios.shape[1]))[:, place].double()
        vectors = vectors / vectors.norm(dim=1, keepdim=True)
        alike = (vectors @ vectors.T).fill_diagonal_(0) > 1 - 1e-6
        twins |= set(tokens[alike.any(1)].tolist())
    return frozenset(twins)


def _refuse_randomness(exposure: Exposure) -> None:
    """Refuse a model that draws random numbers, such as dropout or words that it drops: the vectors that the client had are not known."""
    dropping = [m for m in exposure.model.modules() if isinstance(m, torch.nn.modules.dropout._DropoutNd) and m.training and m.p > 0]
    if dropping:
        raise Refused("dager computes the vectors of every token, and the model drops units at random in train mode")
    with random_states_restored() as before:
        output_of(exposure.model, exposure.public.blank)
        drawn = random_states() != before
    if drawn:
        raise Refused("dager computes the vectors of every token, and the model draws random numbers in its forward pass")
