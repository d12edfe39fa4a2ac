"""An optimisation attack as a choice of parts: distance, priors, schedules, optimiser, start and budget."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from dosimeter.engines.matching.distances import Distance
from dosimeter.engines.matching.optimisers import Optimiser
from dosimeter.engines.matching.priors import Prior
from dosimeter.engines.matching.schedules import Layers, Rate

Path = Literal["auto", "eager", "functional", "captured", "compiled", "fastest"]
Precision = Literal["fp32", "tf32", "bf16"]
# coloured: noise around one colour a sample, in every second start a gradient; constant: one value; tiled: a random patch, repeated
Start = Literal["normal", "uniform", "grey", "coloured", "constant", "tiled"]


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that one published attack chooses, and the budget that its caller grants."""

    distance: Distance
    optimiser: Optimiser
    rate: Rate
    steps: int
    restarts: int = 1
    trial: float | None = None  # after this fraction of the steps only the `survivors` go on: the restarts with the lowest objectives
    survivors: int = 1
    average_within: float = 1.0  # the mean of the restarts within this multiple of the lowest objective is returned, sample by sample
    priors: tuple[Prior, ...] = ()
    layers: Layers = field(default_factory=Layers)
    layer_weights: dict[str, float] | None = None  # by parameter name; 1 where not named
    dropout: float = 0.0  # share of the update's entries that a fresh mask hides from both sides at each step
    consistency: float = 0.0  # pull of every restart towards the restarts' consensus
    consistency_onset: float = 0.0
    registered: bool = False  # the restarts' samples are laid over each other before the consensus is their mean
    pixel_noise: float = 0.0  # standard deviation of the noise on the inputs after each step, in lengths of the step
    matching_onset: float = 0.0  # before it only the priors act
    boxed: bool = True
    start: Start = "normal"
    joint_labels: bool = False  # labels are logits that move with the inputs
    tolerance: float = 0.0  # stop where the distance is at most this share of an uninformed guess's distance
    patience: int | None = None  # stop after this many steps without a better objective
    restart_on_stall: bool = False  # where patience ends, or no restart is finite any more, spend the steps left on fresh starts
    seconds: float | None = None
    path: Path = "auto"
    precision: Precision = "fp32"
