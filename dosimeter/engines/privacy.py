"""Differential privacy accounting: the ε that mechanisms spend, by Opacus's accountants, and what a list of defenses promises."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

from dosimeter.engines.gaussian_mechanism import exact_epsilon
from dosimeter.interfaces import Defense
from dosimeter.types import Accountant, Accounting, Guarantee, Refused

OPACUS = {"rdp": "RDPAccountant", "gdp": "GaussianAccountant", "prv": "PRVAccountant"}
MOST_PRV_POINTS = 2**23  # of the grid on which `prv` convolves losses; Opacus sets no limit, and little noise asks for terabytes
LARGEST_PRV_LOSS = 700.0  # beyond it e^loss is no number, and Opacus returns an ε near 707 whatever the noise
PRV_ERROR = 0.01  # of ε, as Opacus takes it


def guarantees(
    defenses: Sequence[Defense], *, sample_rate: float = 1.0, steps: int = 1, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> list[Guarantee]:
    """The (ε, δ) guarantees of `steps` rounds behind `defenses`, `sample_rate` of the client's data in each.

    Each defense says what it promises, given the defense of the update directly before it, and which promises it voids.
    """
    accounting = Accounting(sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant)
    void = {unit for defense in defenses for unit in defense.voided_units()}
    found, previous = [], None
    for defense in defenses:
        if (promised := defense.guarantee(accounting, previous)) is not None and promised.unit not in void:
            found.append(promised)
        previous = defense if defense.side == "update" else previous
    return found


def gaussian_epsilon(
    *, noise_multiplier: float, sample_rate: float = 1.0, steps: int = 1, delta: float = 1e-5, accountant: Accountant = "rdp"
) -> float:
    """ε at δ of `steps` Gaussian mechanisms whose noise is `noise_multiplier` times the sensitivity, each on a Poisson sample.

    `rdp`: Mironov, Talwar & Zhang, "Rényi Differential Privacy of the Sampled Gaussian Mechanism", 2019; an upper bound.
    `gdp`: Dong, Roth & Su, "Gaussian Differential Privacy", JRSS-B 2022, by its central limit theorem; an approximation.
    `prv`: Gopi, Lee & Wutschitz, "Numerical Composition of Differential Privacy", NeurIPS 2021; an upper bound, the tightest.
    With all samples in each step its ε is in closed form, `exact_epsilon`.
    """
    if not 0 <= sample_rate <= 1 or not 0 < delta < 1 or steps < 0 or not noise_multiplier >= 0:
        raise ValueError(
            "privacy: expected noise_multiplier >= 0, sample_rate in [0, 1], steps >= 0 and delta in (0, 1), "
            f"got {noise_multiplier}, {sample_rate}, {steps} and {delta}"
        )
    if sample_rate == 0 or steps == 0 or math.isinf(noise_multiplier):
        return 0.0
    if noise_multiplier == 0:
        return math.inf
    if accountant == "prv" and sample_rate == 1:
        return exact_epsilon(math.sqrt(steps) / noise_multiplier, delta)
    try:
        from opacus import accountants
    except ImportError as error:
        raise Refused("ε is counted by Opacus's accountants, and opacus is not installed: pip install opacus") from error
    none_found, spent = f"the {accountant} accountant finds no ε for this noise", [(noise_multiplier, sample_rate, steps)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the best of the orders tried is the first or the last: ε is still an upper bound
        counting, losses = getattr(accountants, OPACUS[accountant])(), accountants.RDPAccountant()
        counting.history = losses.history = spent
        try:
            if accountant == "prv":
                largest = losses.get_epsilon(delta=delta / 4000)  # of the losses that the grid holds
                points = 2 * largest / PRV_ERROR * math.sqrt(steps * math.log(12_000 / delta) / 2)
                if not (largest <= LARGEST_PRV_LOSS and points <= MOST_PRV_POINTS):
                    raise Refused(f"{none_found}: its grid would be too large; rdp may")
            return max(0.0, float(counting.get_epsilon(delta=delta)))
        except (ValueError, RuntimeError, ArithmeticError) as error:
            raise Refused(f"{none_found}: {error}; another accountant may") from error
