"""How long an audit takes: one step of each attack is timed, and a limit on the whole is shared among the attacks."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dosimeter.artefacts import save_checkpoints
from dosimeter.interfaces import Attack, Exposure, Recovery
from dosimeter.network.copies import deep_copy
from dosimeter.network.leftovers import nothing_kept
from dosimeter.numbers import duration
from dosimeter.options import OptionError
from dosimeter.progress import listening
from dosimeter.runs.server import run_method
from dosimeter.surfaces.surface import surface_of_method
from dosimeter.types import LabelEstimate

LEAST_SHARE_OF_STEPS = 1 / 32  # an attack that would have to do with fewer of its steps is left out
FEWEST_STEPS = 10


# One core that computes and moves data as fast as this needs so many seconds for a step. Only the order of magnitude matters.
FLOPS_A_SECOND, SECONDS_A_PARAMETER, FORWARDS_A_STEP = 7.5e10, 1.8e-8, 6
QUICK_SECONDS = 12.0  # of that core, which one attack may take where the budget is quick


class _Enough(BaseException):
    """What is timed is done. No method catches it."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one run of a method takes. `steps` is 0 where the method has no steps to cut, or was not seen to take them."""

    setup: float = 0.0  # seconds before the first step
    each: float = 0.0  # seconds of one step
    steps: int = 0
    runs: int = 1  # two, where the foreign null repeats the attack

    @property
    def seconds(self) -> float:
        return self.runs * (self.setup + self.each * max(1, self.steps))


def forecast(method: Any, exposure: Exposure, seed: int) -> Forecast:
    """Time one step of a method, on labels that nobody recovered. A method without steps is taken to need no time.

    What comes before the first step counts once a run. Where something else takes the first steps, such as the training of a decoder, two
    of them are timed: it is done once, and cannot be cut.
    """
    if not (hasattr(method, "steps") or hasattr(method, "epochs")):
        return Forecast()
    surface = surface_of_method(method)
    runs = 2 if surface.has_foreign_null else 1
    tried = replace(method, steps=1) if isinstance(getattr(method, "steps", None), int) else method
    marks: list[tuple[float, int, int]] = []  # time, steps done, steps in all

    def listen(done: int, total: int, note: str) -> None:
        marks.append((time.perf_counter(), done, total))
        if total > 1 and len(marks) > 1 and done > marks[0][1] and marks[0][2] == total:
            raise _Enough

    began = time.perf_counter()
    try:
        with listening(listen), save_checkpoints(None):
            run_method(exposure, tried, _stand_in_labels(exposure) if surface.takes_labels else None, seed)
    except _Enough:
        (start, first, total), (end, last, _) = marks[0], marks[-1]
        return Forecast(setup=start - began + (end - start) / (last - first) * total)
    except Exception:  # what it cannot do it will say when its turn comes
        return Forecast()
    end = time.perf_counter()
    start = next((at for at, _, total in marks if total == 1), None)
    if start is None or tried is method:
        return Forecast(setup=end - began, runs=runs)
    return Forecast(setup=start - began, each=end - start, steps=method.steps, runs=runs)


def share_time(wanted: Sequence[float], seconds: float) -> list[float]:
    """Share the time so that nobody gets more than wanted, and those that get less all get the same (max-min fairness)."""
    shares, left, waiting = [0.0] * len(wanted), max(seconds, 0.0), sorted(range(len(wanted)), key=lambda i: wanted[i])
    while waiting:
        smallest, even = waiting[0], left / len(waiting)
        shares[smallest] = min(wanted[smallest], even)
        left -= shares[smallest]
        waiting = waiting[1:]
    return shares


def cut_steps(method: Any, expected: Forecast, seconds: float) -> Any | None:
    """The method with as many of its steps as fit into the time, or None where too few do.

    The number is rounded down to the steps times a power of 2^(−1/2), so that a second run of the audit most likely cuts alike.
    """
    if expected.seconds <= seconds:
        return method
    if not expected.steps or not expected.each:
        return None
    fitting = (seconds / expected.runs - expected.setup) / expected.each
    if fitting < max(FEWEST_STEPS, LEAST_SHARE_OF_STEPS * expected.steps):
        return None
    halvings = math.ceil(-2 * math.log2(min(1.0, fitting / expected.steps)))
    return replace(method, steps=max(1, round(expected.steps * 2 ** (-halvings / 2))))


def seconds_a_step(exposure: Exposure) -> float:
    """How long one step of matching takes on the core above: a count of operations, so that it is the same on every machine."""
    from torch.utils.flop_counter import FlopCounterMode

    parameters = sum(change.numel() for change in exposure.update.values())
    like = next(iter(exposure.update.values()))
    counter = FlopCounterMode(display=False)
    try:
        with torch.no_grad(), nothing_kept(exposure.model), counter:
            deep_copy(exposure.model)(torch.zeros(1, *exposure.public.input_shape, dtype=like.dtype, device=like.device))
    except Exception:  # batch norm in train mode, say, takes no single sample everywhere
        return SECONDS_A_PARAMETER * parameters
    flops = counter.get_total_flops() * (exposure.public.batch_size or 1)
    return FORWARDS_A_STEP * flops / FLOPS_A_SECOND + SECONDS_A_PARAMETER * parameters


def within_quick_budget(method: Any, step: float) -> Any:
    """The method with as many of its steps as `QUICK_SECONDS` allow, if one step of one start takes `step` seconds."""
    steps, starts = getattr(method, "steps", None), getattr(method, "restarts", 1)
    if not isinstance(method, Attack) or not isinstance(steps, int) or not step:
        return method
    allowed = max(FEWEST_STEPS, int(QUICK_SECONDS / (step * starts)))
    return method if steps <= allowed else replace(method, steps=allowed)  # pyright: ignore[reportCallIssue]


@dataclass
class Timetable:
    """The time of one audit: the limit, what the methods are expected to take, and what was cut."""

    limit: float | None = None  # seconds for the whole audit; None: as long as it takes
    began: float = field(default_factory=lambda: time.perf_counter())
    expected: dict[int, Forecast] = field(default_factory=dict)  # by the method's identity, since options may be unhashable
    cuts: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.limit is not None and not (isinstance(self.limit, (int, float)) and 0 < self.limit < math.inf):
            raise OptionError("max_seconds", f"expected a positive number of seconds, got {self.limit!r}")

    def time_steps(self, methods: Sequence[Recovery], exposure: Exposure, seed: int) -> None:
        """Time one step of every method, until a tenth of the limit is gone."""
        for method in methods:
            if self.limit is None or self.elapsed < 0.1 * self.limit:
                self.expected[id(method)] = forecast(method, exposure, seed)

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def seconds_for(self, methods: Sequence[Recovery]) -> float:
        return sum(self._expected(method).seconds for method in methods)

    def fit(self, method: Any, later: Sequence[Recovery]) -> tuple[Any | None, str]:
        """The method as it fits into the time that is left beside those that come later, and a sentence on what was cut.

        None stands for a method that is left out.
        """
        if self.limit is None:
            return method, ""
        left = self.limit - self.elapsed
        mine = self._expected(method)
        if left <= 0:
            return None, self._note(f"{method.name} left out: max_seconds = {self.limit:g} had passed")
        allowed = share_time([mine.seconds, *(self._expected(other).seconds for other in later)], left)[0]
        fitted = cut_steps(method, mine, allowed)
        if fitted is None:
            needs = f"it takes about {duration(mine.seconds)}, and max_seconds = {self.limit:g} leave it {duration(allowed)}"
            return None, self._note(f"{method.name} left out: {needs}")
        if fitted is method:
            return method, ""
        return fitted, self._note(f"{method.name} cut to {fitted.steps} of {method.steps} steps, to keep max_seconds = {self.limit:g}")

    def _expected(self, method: Recovery) -> Forecast:
        return self.expected.get(id(method), Forecast())

    def _note(self, sentence: str) -> str:
        self.cuts.append(sentence)
        return sentence


def _stand_in_labels(exposure: Exposure) -> LabelEstimate:
    """Labels in turn, as many as the batch may have samples: good enough to time a step."""
    public = exposure.public
    count = public.batch_size or 1
    device = next(iter(exposure.update.values())).device
    ids = torch.arange(count, device=device) % max(public.classes, 1)
    return LabelEstimate(counts=torch.bincount(ids, minlength=public.classes), labels=ids)


def left_out(details: Mapping[str, Any]) -> bool:
    """Whether a record stands for a method that had no time, so that a later audit runs it."""
    return bool(details.get("left_out"))
