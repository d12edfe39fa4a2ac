"""Bounds in as many products with the update's Jacobian as the time of an audit allows."""

from __future__ import annotations

from dosimeter.types import Refused

FEWEST_LANCZOS_STEPS = 4


def fewer_steps(bound: str, steps: int, products: float, products_a_step: int) -> int:
    """As many Lanczos steps as `products` allow, and no more than `steps`."""
    allowed = int(products / products_a_step)
    if allowed < FEWEST_LANCZOS_STEPS:
        raise too_long(bound)
    return min(steps, allowed)


def too_long(bound: str) -> Refused:
    return Refused(f"{bound} would take longer than an attack may take here; dm.ceilings computes it")
