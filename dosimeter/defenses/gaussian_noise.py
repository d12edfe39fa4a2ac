"""Gaussian noise on the update."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Generator, Tensor

from dosimeter.defenses.outgoing import OutgoingDefense, largest_magnitude, live_entries, noise_replay, standard_normal, with_noise
from dosimeter.engines.privacy import gaussian_epsilon
from dosimeter.interfaces import Attack, Defense, Public, Replay
from dosimeter.options import FiniteFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Accounting, Distortion, Encoding, Guarantee, ProtectedUnit, Update


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
    strengths: ClassVar = ({"std": 1e-3}, {"std": 1e-2})

    std: FiniteFloat
    relative: bool = False

    def distorts(self) -> bool:
        return self.std > 0

    def protect(self, update: Update, rng: Generator) -> Update:
        if self.std == 0:
            return dict(update)
        return with_noise(update, standard_normal, rng, size=self.std, relative=self.relative, defense=self.name)

    def deviation(self, change: Tensor) -> float:
        """The noise's standard deviation in a layer, from the layer as it was sent."""
        return self.std * (largest_magnitude(change) if self.relative else 1.0)

    def noise_floor(self, change: Tensor, batch_size: int) -> float:
        return self.deviation(change)

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        return live_entries(change, noise=self.deviation(change))

    def scaling(self) -> Literal["none"]:
        return "none"

    def adds_noise(self) -> bool:
        return self.std > 0

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return noise_replay(sent, self.deviation, relative=self.relative)

    def noise_multiplier_of(self, previous: Defense | None) -> tuple[ProtectedUnit, float] | None:
        """Against an update of zeros, which the batch moves by at most the bound."""
        bound = math.inf if previous is None else previous.norm_bound()
        return None if math.isinf(bound) or self.std == 0 or self.relative else ("client", self.std / bound)

    def encoding(self, before: Encoding) -> Encoding:
        return Encoding() if self.std > 0 else before

    def guarantee(self, accounting: Accounting, previous: Defense | None) -> Guarantee | None:
        """For the whole client, against a server that sees its update alone, where the defense before bounds the update.

        Any two updates differ by at most twice the bound. The client takes part in every round, so no sampling helps.
        """
        bound = math.inf if previous is None else previous.norm_bound()
        if previous is None or math.isinf(bound) or self.std == 0 or self.relative:
            return None
        epsilon = gaussian_epsilon(
            noise_multiplier=self.std / (2 * bound), steps=accounting.steps, delta=accounting.delta, accountant=accounting.accountant
        )
        source = f"{previous.name} and {self.name} by {accounting.accountant}"
        return Guarantee(epsilon=epsilon, delta=accounting.delta, unit="client", source=source)
