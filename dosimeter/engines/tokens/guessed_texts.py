"""Texts by gradient matching: the distance of guessed vectors, and the estimate that their nearest tokens make."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.terms import TermSchedule
from dosimeter.engines.needs import check_needs
from dosimeter.engines.tokens.embedded import Embedded
from dosimeter.interfaces import Exposure
from dosimeter.registry import TOKENS
from dosimeter.types import Outcome, Reconstruction, Refused, TokenEstimate


def distance_at(problem: Problem, vectors: Tensor) -> float:
    """The distance alone at vectors (B, T, H), without its derivative."""
    names, terms = TermSchedule(problem).final()
    return float(problem.objective(vectors, None, problem.objective.buffers(), names, terms, functional=False)[1].detach())


def tokens_with_rows(exposure: Exposure, embedded: Embedded, rng: Generator) -> Tensor:
    """Which tokens the embedding's own gradient lists: (V,) bool."""
    listing = TOKENS.build("embedding_rows")
    check_needs(listing, exposure, None)
    found = sorted(listing(exposure, rng).tokens)
    if not found:
        raise Refused("the embedding's gradient lists no token; leave `rows` out to guess among all")
    allowed = torch.zeros(embedded.embedding.vocabulary, dtype=torch.bool, device=embedded.embedding.weight.device)
    allowed[found] = True
    return allowed


def require_answer(method: str, found: Reconstruction) -> None:
    """Refuse where matching took no step at all."""
    if found.outcome is Outcome.NOT_ATTEMPTED:
        raise Refused(f"{method}: {found.message}")


def estimate_of(embedded: Embedded, found: Reconstruction, allowed: Tensor | None, message: str = "") -> TokenEstimate:
    """The tokens nearest to the vectors that were found; guesses, of which nothing is certified."""
    texts = [tuple(row) for row in embedded.nearest(found.inputs, allowed).tolist()] if found.inputs.isfinite().all() else []
    return TokenEstimate(
        tokens=frozenset(token for text in texts for token in text),
        sequences=tuple(texts),
        certified_sequences=tuple(False for _ in texts),
        outcome=found.outcome,
        message="; ".join(filter(None, (found.message, message))),
        details={"embedding": embedded.embedding.name, "vocabulary": embedded.embedding.vocabulary, "distance": found.distance},
    )
