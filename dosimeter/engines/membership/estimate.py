"""What an update says of each candidate, and the most that any test behind noise can say."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dosimeter.engines.bounds.reconstruction_robustness import SuccessBound, success_bound
from dosimeter.types import Estimate, Refused


@dataclass(frozen=True, kw_only=True, repr=False)
class MembershipEstimate(Estimate):
    """What an update says of each candidate: in the batch, not in it, or how likely."""

    scores: Tensor  # (n,) larger: more likely in the batch; in one update, comparable with one another; nan: the candidate leaves no trace
    members: Tensor  # (n,) bool: proved to be in the batch, under `premises`
    excluded: Tensor  # (n,) bool: proved not to be in it
    test: str  # the method that scored them
    error_bar: float | None = None  # what rounding may add to a member's distance; None where nothing is proved
    layer: str = ""  # whose gradient proves it; "" where nothing is proved
    noise_multiplier: float | None = None  # of the clipped mechanism, where the client has one: `bound` needs it

    def bound(self, false_positive_rate: float, *, replaced: bool = True) -> SuccessBound:
        """The largest share of members that any test of this one update finds, at a share of false alarms."""
        if self.noise_multiplier is None:
            raise Refused("a bound on membership needs a clipped update with Gaussian noise for each sample, such as dpsgd")
        return true_positive_bound(false_positive_rate, noise_multiplier=self.noise_multiplier, replaced=replaced)


def true_positive_bound(false_positive_rate: float, *, noise_multiplier: float, steps: int = 1, replaced: bool = True) -> SuccessBound:
    """The largest share of members that any test finds, at a share of false alarms, behind clipping and Gaussian noise.

    Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022, the trade-off function of the Gaussian mechanism: Φ(Φ⁻¹(α) + μ) with
    μ = √steps / σ where the sample is left out, and twice that where another one is in its place (`replaced`), which moves the sum by up to
    twice the clipping norm. It is the same trade-off as in reconstruction robustness.
    """
    moved = noise_multiplier / 2 if replaced else noise_multiplier
    return success_bound(noise_multiplier=moved, chance=false_positive_rate, steps=steps)
