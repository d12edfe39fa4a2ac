"""The ranges of options within which every figure stays a number."""

from __future__ import annotations

from typing import Annotated

from dosimeter.options import Constraint

LEAST, LARGEST = 1e-12, 1e12
MOST = 10**9

Positive = Annotated[float, Constraint(f"a number from {LEAST:g} to {LARGEST:g}", lambda value: LEAST <= value <= LARGEST)]
PositiveOrZero = Annotated[
    float, Constraint(f"0, or a number from {LEAST:g} to {LARGEST:g}", lambda value: value == 0 or LEAST <= value <= LARGEST)
]
Probability = Annotated[float, Constraint("a number from 1e-100 to below 1", lambda value: 1e-100 <= value < 1)]
Count = Annotated[int, Constraint(f"an int from 1 to {MOST}", lambda value: 1 <= value <= MOST)]
