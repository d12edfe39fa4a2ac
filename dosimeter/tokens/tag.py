"""TAG: vectors whose gradient is the client's, in squares and in magnitudes, and the tokens nearest to them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Generator

from dosimeter.engines.matching.distances import SquaredAndAbsolute
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve_problem
from dosimeter.engines.tokens.embedded import over_vectors
from dosimeter.engines.tokens.guessed_texts import estimate_of, require_answer, tokens_with_rows
from dosimeter.engines.tokens.known_labels import labels_of_texts
from dosimeter.interfaces import Exposure, TokenRecovery
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import TOKENS
from dosimeter.types import Knowledge, TokenEstimate


@TOKENS.register("tag")
@dataclass(frozen=True, kw_only=True)
class TAG(TokenRecovery):
    """Moves vectors in the place of the tokens' until their gradient is the client's, and names the nearest tokens.

    Deng et al., "TAG: Gradient Attack on Transformer-based Language Models", Findings of EMNLP 2021: the distance is
    Σ ‖g − g*‖² + α ‖g − g*‖₁. Steps, rate and α are those with which Balunović et al. (NeurIPS 2022) ran it.
    Departures: α is the same in every layer, as in their code; the paper lets it fall with depth. Starts and steps are measured in
    the root mean square of the embedding's entries. Labels are what a label recovery tells; where every one refuses, they move with the
    vectors. The lengths of texts are not known: every text fills the row. The embedding's own gradient is not matched; `rows` lets it
    list the tokens that may be named.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})
    reads_any_update: ClassVar[bool] = True  # the client's steps are replayed
    quick: ClassVar[dict[str, Any]] = {"steps": 300}

    steps: PositiveInt = 2500
    learning_rate: PositiveFloat = 0.1
    absolute: NonNegativeFloat = 0.01  # α
    rows: bool = False  # only tokens whose rows of the embedding's gradient are not zero
    seconds: PositiveFloat | None = None

    def __call__(self, exposure: Exposure, rng: Generator) -> TokenEstimate:
        embedded = over_vectors(exposure, self.name)
        allowed = tokens_with_rows(exposure, embedded, rng) if self.rows else None
        labels = labels_of_texts(exposure, rng)
        recipe = Recipe(
            distance=SquaredAndAbsolute(self.absolute),
            optimiser=Adam(),
            rate=Rate(start=self.learning_rate * embedded.unit, shape="constant"),
            steps=self.steps,
            boxed=False,
            joint_labels=labels is None,
            seconds=self.seconds,
            path="eager",
        )
        problem = make_problem(embedded.exposure, labels, recipe)
        start = torch.randn(problem.guess.shape, generator=rng, device=rng.device) * embedded.unit
        found = solve_problem(problem, rng, start=start)
        require_answer(self.name, found)
        return estimate_of(embedded, found, allowed, "" if labels is None or labels.certified else "the labels are not proved")
