"""What a list of defenses promises on paper: every (ε, δ) that follows from it, and nothing else."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from dosimeter.defenses.clipping import Clipping
from dosimeter.defenses.dpsgd import DPSGD
from dosimeter.defenses.gaussian_noise import GaussianNoise
from dosimeter.defenses.instahide import InstaHide
from dosimeter.defenses.mixup import Mixup
from dosimeter.defenses.random_labels import RandomLabels
from dosimeter.defenses.soteria import Soteria
from dosimeter.engines.privacy import Accountant, Guarantee, gaussian_epsilon
from dosimeter.interfaces import Defense


def guarantees(
    defenses: Sequence[Defense], *, sample_rate: float = 1.0, steps: int = 1, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> list[Guarantee]:
    """The (ε, δ) guarantees of `steps` rounds behind `defenses`, `sample_rate` of the client's data in each.

    - `dpsgd`: for each sample, unless samples are blended before, when one sample moves several clipped gradients.
    - `clipping` of the norm directly before `gaussian_noise`: for the whole client, against a server that sees its update alone.
      Any two updates differ by at most 2 · max_norm, and the client takes part in every round, so no sampling helps.
    - `random_labels`: for each label, if it is randomised once and reused over the rounds.
    - With `soteria` neither of the first two: where its zeros stand depends on the private samples, without noise.
    """
    found = []
    blended = any(isinstance(defense, (Mixup, InstaHide)) for defense in defenses)
    masked = any(isinstance(defense, Soteria) for defense in defenses)
    for defense in defenses:
        if isinstance(defense, DPSGD) and defense.noise_multiplier > 0 and not blended and not masked:
            epsilon = defense.epsilon(sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant)
            found.append(Guarantee(epsilon=epsilon, delta=delta, unit="sample", source=f"dpsgd by {accountant}"))
        if isinstance(defense, RandomLabels) and defense.epsilon < math.inf:
            found.append(Guarantee(epsilon=defense.epsilon, delta=0.0, unit="label", source="random_labels"))
    outgoing = [defense for defense in defenses if defense.side == "update"]
    for clip, noise in pairwise(outgoing):
        if not isinstance(clip, Clipping) or not isinstance(noise, GaussianNoise) or masked:
            continue
        if clip.mode == "norm" and clip.max_norm < math.inf and noise.std > 0 and not noise.relative:
            multiplier = noise.std / (2 * clip.max_norm)
            epsilon = gaussian_epsilon(noise_multiplier=multiplier, steps=steps, delta=delta, accountant=accountant)
            found.append(Guarantee(epsilon=epsilon, delta=delta, unit="client", source=f"clipping and gaussian_noise by {accountant}"))
    return found
