"""Which rows of the embedding's gradient a text leaves traces in, as the model looks it up: shown on texts of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.client.gradients import eager_gradient, leaves
from dosimeter.client.losses import CrossEntropy, TokenCrossEntropy
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import Arrival, copied_buffers, random_states_restored, record_arrivals
from dosimeter.network.token_inputs import TokenEmbedding, with_ids
from dosimeter.randomness import generator
from dosimeter.types import NamedInputs

TEXTS = 3  # a token that the model adds is in one of them at most, so that the others show it
TIED_SHARE = 0.5  # of the vocabulary: rows beyond a text's own are the output layer's where they are so many


@dataclass(frozen=True, kw_only=True)
class Lookups:
    """What the rows of an embedding's gradient tell of a text."""

    tied: bool  # the output layer uses the same weight, so that all rows have a gradient
    added: frozenset[int]  # tokens that the model adds to every text itself, such as one that begins it
    doubt: str  # why a row may belong to a token that is in no text; "" where it does not


def lookups_of(exposure: Exposure, embedding: TokenEmbedding) -> Lookups:
    """Texts without common tokens show what the model looks up beside a text's own tokens; the whole vocabulary, what it replaces."""
    blank, model = exposure.public.blank, exposure.model
    main = blank.main if isinstance(blank, NamedInputs) else blank
    order = torch.randperm(embedding.vocabulary, generator=generator(0, "probe texts")).to(main)
    texts = [part[torch.arange(main.shape[1]) % len(part)][None] for part in order.tensor_split(TEXTS) if len(part)]  # (1, T) each
    slopes = [rows_with_slopes(exposure, embedding, text) for text in texts]
    own = [frozenset(text.flatten().tolist()) for text in texts]
    beyond = [rows - tokens for rows, tokens in zip(slopes, own)]
    tied = any(len(rows) > TIED_SHARE * embedding.vocabulary for rows in beyond)
    called = [_looked_up(model, embedding, with_ids(blank, text)) - tokens for text, tokens in zip(texts, own)]
    strays = called if tied else [one | other for one, other in zip(beyond, called)]
    added = frozenset().union(*strays)
    if any(stray != added - tokens for stray, tokens in zip(strays, own)):
        return Lookups(tied=tied, added=frozenset(), doubt="the model looks up other tokens than those of a text")
    return Lookups(tied=tied, added=added, doubt=_replaces(model, embedding, blank, order))


def rows_with_slopes(exposure: Exposure, embedding: TokenEmbedding, ids: Tensor) -> frozenset[int]:
    """The rows with a gradient of one text."""
    positions = exposure.public.positions
    loss = TokenCrossEntropy() if positions else CrossEntropy()
    targets = torch.zeros_like(ids) if positions else torch.zeros(1, dtype=torch.int64, device=ids.device)
    gradient = eager_gradient(exposure.model, loss, create_graph=False)
    with random_states_restored():
        probe = with_ids(exposure.public.blank, ids)
        slope = gradient(leaves(exposure.model), copied_buffers(exposure.model), probe, targets).get(embedding.parameter)
    return frozenset() if slope is None else frozenset(slope.any(1).nonzero().flatten().tolist())


def _looked_up(model: nn.Module, embedding: TokenEmbedding, text: Any) -> frozenset[int]:
    """All ids that the embedding receives, whatever module holds its weight, in one pass."""
    arrivals = record_arrivals(model, text, _holding(model, embedding))
    return frozenset(token for one in arrivals if isinstance(one.received, Tensor) for token in one.received.flatten().tolist())


def _replaces(model: nn.Module, embedding: TokenEmbedding, blank: Any, order: Tensor) -> str:
    """Why a token's row may be another token's, where the model changes ids before it looks them up; "" where it does not."""
    length = (blank.main if isinstance(blank, NamedInputs) else blank).shape[1]
    whole = torch.cat([order, order[: -len(order) % length]]) if len(order) >= length else order.repeat(length)[:length]
    ids = whole.reshape(-1, length)

    def fits(arrival: Arrival) -> bool:
        return isinstance(arrival.received, Tensor) and arrival.received.shape == ids.shape

    arrivals = record_arrivals(model, with_ids(blank, ids), _holding(model, embedding), last=fits)
    seen = next((one for one in arrivals if fits(one)), None)
    if seen is None or not torch.equal(seen.received, ids):
        return "the model replaces tokens before it looks them up"
    return "the model draws random numbers before it looks the tokens up" if seen.drawn else ""


def _holding(model: nn.Module, embedding: TokenEmbedding) -> Any:
    weight = model.get_parameter(embedding.parameter)
    return lambda _, module: isinstance(module, nn.Embedding) and module.weight is weight
