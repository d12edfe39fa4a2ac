"""HFGInv's second stage: match the deep layers first, then the shallower ones, then polish."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from torch import Generator

from dosimeter.engines.matching.attack import MatchingAttack
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.priors import Prior, TotalVariation, batch_norm_prior, batch_norms
from dosimeter.engines.matching.recipe import Path, Precision, Recipe
from dosimeter.engines.matching.schedules import Layers, Rate, blocks, first_block
from dosimeter.engines.matching.solve import solve
from dosimeter.interfaces import Exposure
from dosimeter.options import Fraction, NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Reconstruction, Refused

BATCH_NORM, BATCH_NORM_PRINTED = 2e-5, 1e-4  # weights of the prior: in the norm's units, and the paper's in those of the maps


@ATTACKS.register("stepwise")
@dataclass(frozen=True, kw_only=True)
class Stepwise(MatchingAttack):
    """Matches the deepest layers first and adds others, hides random entries at every step, and adds the priors last.

    Ye et al., "High-Fidelity Gradient Inversion in Distributed Learning" (HFGInv), AAAI 2024, Stage II: Eqs. (9)-(12). Cosine distance
    under fresh dropout masks. Total variation starts after 1/5 (T₁), batch-norm statistics after 1/3 (T₂) of the steps. `variant` is
    the paper (sign, isotropic total variation) or its released code (soft sign, L1 variation, first two batch norms weighted 1.3 and
    3). Stem and first block are never matched, unless `blocks` names the blocks whose gradients are (Fig. 8); what stands behind the
    last block counts to it.
    Departures: onsets are fractions of `steps`. A ninth of the layers enters at once. Total variation is a mean, batch-norm statistics
    are in the norm's units: `variant="printed"` is the paper with Eq. (11) as printed, a sum and the maps' own units. Gradients are not
    doubled at first, which Adam undoes.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.LABELS})
    matches: ClassVar = "direction"
    quick: ClassVar[dict[str, Any]] = {"steps": 300}

    steps: PositiveInt = 15000
    restarts: PositiveInt = 1
    variant: Literal["released", "paper", "printed"] = "released"
    learning_rate: PositiveFloat = 0.1
    total_variation: NonNegativeFloat | None = None  # none: as the variant has it
    total_variation_onset: Fraction = 0.2
    batch_norm: NonNegativeFloat | None = None  # none: as the variant has it
    batch_norm_onset: Fraction = 1 / 3
    dropout: Fraction = 0.3
    layer_shares: PositiveInt = 9  # 1: all layers from the start
    layers_every: Fraction = 1 / 30
    skip_first_block: bool = True
    blocks: tuple[PositiveInt, ...] | None = None  # only these are matched, 1 the shallowest; none: by `skip_first_block`
    seconds: PositiveFloat | None = None
    path: Path = "auto"
    precision: Precision = "fp32"

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        recipe = Recipe(
            distance=Cosine(),
            optimiser=Adam(sign="soft" if self.variant == "released" else "signed"),
            rate=Rate(start=self.learning_rate, factor=0.33),
            steps=self.steps,
            restarts=self.restarts,
            priors=self._priors(exposure),
            layers=Layers(shares=self.layer_shares, every=max(self.layers_every, 1e-9), skipped=self._skipped(exposure)),
            dropout=self.dropout,
            seconds=self.seconds,
            path=self.path,
            precision=self.precision,
        )
        return solve(exposure, labels, rng, recipe)

    def _skipped(self, exposure: Exposure) -> frozenset[str]:
        """The layers that are never matched."""
        if self.blocks is None:
            return first_block(exposure.model) if self.skip_first_block else frozenset()
        found = blocks(exposure.model)
        if not self.blocks or max(self.blocks) > len(found):
            has = f"has {len(found)}" if found else "is no stem, three or more blocks and a head"
            raise Refused(f"stepwise: blocks: expected numbers of the model's blocks, got {list(self.blocks)}; the model {has}")
        chosen = frozenset[str]().union(*(found[number - 1] for number in self.blocks))
        if not chosen & exposure.update.keys():
            raise Refused(f"stepwise: blocks: the update holds no layer of the blocks {list(self.blocks)}")
        return frozenset(exposure.update) - chosen

    def _priors(self, exposure: Exposure) -> tuple[Prior, ...]:
        released, printed = self.variant == "released", self.variant == "printed"
        weight = (5e-3 if released else 1e-2) if self.total_variation is None else self.total_variation
        onset = self.total_variation_onset
        if released:
            variation = TotalVariation(weight=weight, onset=onset)
        else:
            variation = TotalVariation(weight=weight, onset=onset, form="isotropic", power=2.0, summed=printed)
        of_norms = (BATCH_NORM_PRINTED if printed else BATCH_NORM) if self.batch_norm is None else self.batch_norm
        if not of_norms or not batch_norms(exposure.model):
            return (variation,)
        statistics = batch_norm_prior(
            exposure.model,
            weight=of_norms,
            onset=self.batch_norm_onset,
            leading=(1.3, 3.0) if released else (),
            buffers=exposure.buffers,
            scaled=not printed,
        )
        return variation, statistics
