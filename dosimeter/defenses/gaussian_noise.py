"""Gaussian noise on the update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Generator

from dosimeter.defenses.outgoing import OutgoingDefense, standard_normal, with_noise
from dosimeter.options import FiniteFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Update


@DEFENSES.register("gaussian_noise")
@dataclass(frozen=True, kw_only=True)
class GaussianNoise(OutgoingDefense):
    """Adds independent Gaussian noise to every entry of the update.

    Sun et al., "Can You Really Backdoor Federated Learning?", 2019, as the noisy gradient of rgla Section 5.3 (σ = 0.01),
    ilrg Appendix G and soft-labels Section 5.2: g + N(0, std²).
    With `relative`, each layer's standard deviation is `std` times the layer's largest magnitude, so that one setting
    means the same on a deep model's small gradients as on a head's large ones.
    """

    promise: ClassVar[str] = "nothing by itself: without a bound on the update there is no sensitivity, hence no ε; list clipping before it"
    breaks: ClassVar[str] = "accuracy, the more the larger the model: the noise of all entries adds up, the signal does not grow"

    std: FiniteFloat
    relative: bool = False

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.std == 0:
            return dict(update)
        return with_noise(update, standard_normal, rng, size=self.std, relative=self.relative, defense=self.name)
