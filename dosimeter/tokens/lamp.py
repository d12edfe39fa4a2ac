"""LAMP: gradient matching on tokens' vectors, in turn with other orders of the tokens, which a language's statistics help to choose."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.engines.matching.distances import Cosine, Distance, SquaredAndAbsolute
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import VectorLength
from dosimeter.engines.matching.problem import Problem, make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve_problem
from dosimeter.engines.matching.surroundings import surroundings
from dosimeter.engines.tokens.embedded import Embedded, over_vectors
from dosimeter.engines.tokens.guessed_texts import distance_at, estimate_of, require_answer, tokens_with_rows
from dosimeter.engines.tokens.known_labels import labels_of_texts
from dosimeter.engines.tokens.language import PairCounts, pair_counts
from dosimeter.engines.tokens.reorder import best_order
from dosimeter.interfaces import Exposure, TokenRecovery
from dosimeter.options import Fraction, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt
from dosimeter.registry import TOKENS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction, Refused, TokenEstimate, Update

DECAY, DECAY_EVERY = 0.89, 50  # of the rate, as released
ABSOLUTE = 0.01  # α of the distance by squares and magnitudes, as released
ROUNDING = 1e-5  # of the largest layer's norm: a layer below it has no direction
WEIGHTS = {"cosine": (1.0, 0.2), "squares": (25.0, 60.0)}  # of the vectors' length and of the language, as released


@TOKENS.register("lamp")
@dataclass(frozen=True, kw_only=True)
class LAMP(TokenRecovery):
    """Moves vectors until their gradient points where the client's does, and tries other orders of their tokens every few steps.

    Balunović et al., "LAMP: Extracting Text from Gradients with Language Model Priors", NeurIPS 2022: Algorithm 1. Continuous steps
    minimise the distance, cosine over layers or squares and magnitudes, and (mean ‖x‖ − mean ‖e‖)². Discrete steps swap two tokens, move
    one, move several, or put the beginning at the end, and keep what lowers the distance plus the text's perplexity. Numbers are those
    of the released code.
    Departures: the language model is counted pairs of tokens in auxiliary texts, in place of GPT-2; without auxiliary texts no text is
    likelier than another. Steps are in units of the embedding's entries (.2 is the paper's .01 for BERT), and Adam begins anew behind
    each discrete phase. Layers whose gradient is rounding, as that of a key's bias, have no direction and are left out. Labels are what a
    label recovery tells. The lengths of texts are not known, and no special token is fixed.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.BATCH_SIZE})
    reads_any_update: ClassVar[bool] = True  # the client's steps are replayed
    quick: ClassVar[dict[str, Any]] = {"steps": 300, "candidates": 20, "proposals": 40}

    steps: PositiveInt = 2000
    learning_rate: PositiveFloat = 0.2
    distance: Literal["cosine", "squares"] = "cosine"
    length_weight: NonNegativeFloat | None = None  # none: 1 for the cosine, 25 for squares
    language_weight: NonNegativeFloat | None = None  # none: .2 for the cosine, 60 for squares
    candidates: PositiveInt = 500  # starts, and as many orders of the best one
    proposals: NonNegativeInt = 200  # of a text in one discrete phase
    every: PositiveInt = 75  # steps between two discrete phases
    burn_in: Fraction = 0.1  # of the steps, before the first one
    rows: bool = False  # only tokens whose rows of the embedding's gradient are not zero

    def __call__(self, exposure: Exposure, rng: Generator) -> TokenEstimate:
        embedded = over_vectors(exposure, self.name)
        allowed = tokens_with_rows(exposure, embedded, rng) if self.rows else None
        labels = labels_of_texts(exposure, rng)
        if labels is None:
            raise Refused("lamp guesses texts under known labels, and every label recovery refuses this setting; tag searches for them")
        problem = make_problem(embedded.exposure, labels, self._recipe(embedded))
        language = pair_counts(exposure.auxiliary, embedded.embedding.vocabulary)
        with surroundings(problem, rng):
            vectors = self._best_start(problem, embedded, rng)
        found, done = None, 0
        while done < self.steps:
            found = self._descend(problem, labels, vectors, done, rng)
            if found.outcome is not Outcome.COMPLETED:
                break
            vectors, done = found.inputs, done + min(self.every, self.steps - done)
            if self.burn_in * self.steps <= done < self.steps:
                with surroundings(problem, rng):
                    vectors = self._reorder(problem, embedded, language, allowed, vectors, rng)
        assert found is not None
        require_answer(self.name, found)
        notes = ["" if labels.certified else "the labels are not proved"]
        notes.append("" if exposure.auxiliary is not None else "without auxiliary texts no text is likelier than another")
        return estimate_of(embedded, found, allowed, "; ".join(filter(None, notes)))

    def _recipe(self, embedded: Embedded) -> Recipe:
        layers = layers_with_direction(embedded.exposure.update)
        distance: Distance = Cosine(per_layer=True) if self.distance == "cosine" else SquaredAndAbsolute(ABSOLUTE)
        weight = WEIGHTS[self.distance][0] if self.length_weight is None else self.length_weight
        length = float(embedded.embedding.weight.norm(dim=1).mean())
        scale = len(layers) if self.distance == "cosine" else 1  # the paper takes the mean over layers, ours is the sum
        return Recipe(
            distance=distance,
            optimiser=Adam(),
            rate=Rate(start=self.learning_rate * embedded.unit, shape="constant"),
            steps=self.steps,
            layer_weights={name: float(name in layers) for name in embedded.exposure.update},
            priors=(VectorLength(weight=scale * weight, length=length),) if weight else (),
            boxed=False,
            path="eager",
        )

    def _best_start(self, problem: Problem, embedded: Embedded, rng: Generator) -> Tensor:
        """The best of several random starts, in the best of several orders, as long as known vectors: (B, T, H)."""
        length = float(embedded.embedding.weight.norm(dim=1).mean())

        def draw() -> Tensor:
            return torch.randn(problem.guess.shape, generator=rng, device=rng.device).to(problem.guess.low)

        best = min((draw() for _ in range(self.candidates)), key=lambda one: distance_at(problem, one * embedded.unit))
        places = best.shape[1]
        orders = [list(range(places)), *(torch.randperm(places, generator=rng, device=rng.device).tolist() for _ in range(self.candidates))]
        order = min(orders, key=lambda one: distance_at(problem, best[:, one] * embedded.unit))
        return best[:, order] / best[:, order].norm(dim=-1, keepdim=True) * length

    def _descend(self, problem: Problem, labels: LabelEstimate, vectors: Tensor, done: int, rng: Generator) -> Reconstruction:
        """The continuous steps up to the next discrete phase."""
        rate = problem.recipe.rate.start * DECAY ** (done // DECAY_EVERY)
        recipe = replace(problem.recipe, steps=min(self.every, self.steps - done), rate=Rate(start=rate, shape="constant"))
        return solve_problem(make_problem(problem.exposure, labels, recipe), rng, start=vectors)

    def _reorder(
        self, problem: Problem, embedded: Embedded, language: PairCounts, allowed: Tensor | None, vectors: Tensor, rng: Generator
    ) -> Tensor:
        """The discrete phase: text by text, the order of its vectors with the lowest distance and perplexity."""
        weight = WEIGHTS[self.distance][1] if self.language_weight is None else self.language_weight
        scale = len(layers_with_direction(embedded.exposure.update)) if self.distance == "cosine" else 1
        ids = embedded.nearest(vectors, allowed)

        def value(text: int, order: list[int]) -> float:
            surprise = float(language.surprise(ids[text : text + 1, order])[0])
            return distance_at(problem, _reordered(vectors, text, order)) / scale + weight * surprise

        for text in range(len(vectors)):
            order = best_order(vectors.shape[1], partial(value, text), self.proposals, rng)
            vectors, ids = _reordered(vectors, text, order), _reordered(ids, text, order)
        return vectors


def _reordered(rows: Tensor, text: int, order: list[int]) -> Tensor:
    """One text (B, T, ...) in another order."""
    changed = rows.clone()
    changed[text] = rows[text, order]
    return changed


def layers_with_direction(update: Update) -> frozenset[str]:
    """The layers whose gradient is more than rounding."""
    norms = {name: float(change.double().norm()) for name, change in update.items()}
    return frozenset(name for name, norm in norms.items() if norm > ROUNDING * max(norms.values()))
