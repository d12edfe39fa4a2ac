"""What a kind of draw is: a name, a function of a seed, and the premise that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Row:
    """One answer of a method, held against the truth."""

    certified: bool  # the method claims a proof
    true: bool  # what it claims holds; of no weight where nothing is claimed
    recovered: bool  # the answer is right, whether claimed or not
    samples: int = 1  # that the answer is about
    premises: tuple[str, ...] = ()  # that the answer prints


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of draw. `draw(seed)` runs a method on a fresh configuration; a `Refused` that it raises counts as refused."""

    name: str  # surface/method: configuration
    draw: Callable[[int], Iterable[Row]]
    breaks: str = ""  # a word of the premise that the draw breaks; "" where everything declared is right
    skipped: str = ""  # why the kind cannot run here, "" where it can
