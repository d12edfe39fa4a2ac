"""How long an audit takes: one step of each attack is timed, and a limit on the whole is shared among the attacks."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from dosimeter.artefacts import save_checkpoints
from dosimeter.attacks.learning_to_invert import LearningToInvert
from dosimeter.engines.decoder.drawing import DrawsWithDecoder
from dosimeter.interfaces import Attack, Exposure, Recovery, Tampering, TokenRecovery
from dosimeter.labels.rlu import RLU
from dosimeter.network.operations import FLOPS_A_SECOND, forward_flops
from dosimeter.numbers import duration
from dosimeter.options import OptionError
from dosimeter.progress import listening
from dosimeter.runs.server import run_method
from dosimeter.surfaces.surface import surface_of_method
from dosimeter.types import LabelEstimate

LEAST_SHARE_OF_STEPS = 1 / 32  # an attack that would have to do with fewer of its steps is left out
FEWEST_STEPS = 10


# One core that moves data as fast as this needs so many seconds for a step. Only the order of magnitude matters.
SECONDS_A_PARAMETER, FORWARDS_A_STEP = 1.8e-8, 6
QUICK_SECONDS = 12.0  # of that core, which one attack may take where the budget is quick
QUICK_MATCHING_SECONDS = 36.0  # of that core, which the attacks that match gradients share there
QUICK_SIMULATION_SECONDS = 24.0  # of that core, for the clients that one method simulates
FEWEST_PROBES = 8  # auxiliary samples, on which `rlu` compares their models
FEWEST_SIMULATIONS = 64  # updates, on which `learning_to_invert` trains
QUICK_TRAINING_SECONDS = 90.0  # of that core, for a decoder that several attacks share
LEAST_SHARE_OF_EPOCHS = 1 / 3  # in a quick audit; a decoder that would have to do with fewer is not trained
LEAST_SHARE_OF_TRAINING = 1 / 8  # of its seconds, where max_seconds cuts it
STOPPED_AFTER = 1.1  # of the limit: a method that takes steps even then is ended


class _Enough(BaseException):
    """What is timed is done. No method catches it."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What one run of a method takes. `steps` is 0 where the method has no steps to cut, or was not seen to take them."""

    setup: float = 0.0  # seconds before the first step
    training: float = 0.0  # seconds of a decoder's training, which several methods may share
    each: float = 0.0  # seconds of one step
    steps: int = 0
    runs: int = 1  # two, where the foreign null repeats the attack

    @property
    def seconds(self) -> float:
        return self.training + self.runs * (self.setup + self.each * max(1, self.steps))


class OutOfTime(BaseException):
    """A method ran long after the limit. No method catches it."""


def _takes_steps(method: Any) -> bool:
    return hasattr(method, "steps") or hasattr(method, "epochs")


def forecast(method: Any, exposure: Exposure, seed: int) -> Forecast:
    """Time one step of a method, on labels that nobody recovered. A method without steps is taken to need no time.

    What comes before the first step counts once a run. Where the training of a decoder takes the first steps, two of them are timed.
    """
    if not _takes_steps(method):
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
        whole = start - began + (end - start) / (last - first) * total
        return Forecast(training=whole) if isinstance(method, DrawsWithDecoder) else Forecast(setup=whole)
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
    """The method with as much of its training or as many of its steps as fit into the time, or None where too few do.

    Either is rounded down to the whole times a power of 2^(−1/2), so that a second run of the audit most likely cuts alike.
    """
    if expected.seconds <= seconds:
        return method
    if expected.training:
        share = (seconds - expected.seconds + expected.training) / expected.training
        return replace(method, training_seconds=expected.training * _coarsely(share)) if share >= LEAST_SHARE_OF_TRAINING else None
    if not expected.steps or not expected.each:
        return None
    fitting = (seconds / expected.runs - expected.setup) / expected.each
    if fitting < max(FEWEST_STEPS, LEAST_SHARE_OF_STEPS * expected.steps):
        return None
    return replace(method, steps=max(1, round(expected.steps * _coarsely(fitting / expected.steps))))


def _coarsely(share: float) -> float:
    """The next power of 2^(−1/2) that is no larger."""
    return 2 ** (-math.ceil(-2 * math.log2(min(1.0, share))) / 2)


def seconds_a_step(exposure: Exposure) -> float:
    """How long one step of matching takes on the core above: a count of operations, so that it is the same on every machine."""
    parameters = sum(change.numel() for change in exposure.update.values())
    like = next(iter(exposure.update.values()))
    pixels = torch.zeros(1, *exposure.public.input_shape, dtype=like.dtype, device=like.device)
    sample = pixels if exposure.public.blank is None else exposure.public.blank
    flops = (forward_flops(exposure.model, sample) or 0.0) * (exposure.public.batch_size or 1)
    return FORWARDS_A_STEP * flops / FLOPS_A_SECOND + SECONDS_A_PARAMETER * parameters


def within_quick_budget(methods: Sequence[Any], step: float) -> tuple[list[Any], dict[int, str]]:
    """The methods with as many steps as a quick audit gives them, if one step of one start takes `step` seconds.

    Attacks that match gradients share `QUICK_MATCHING_SECONDS` in the order of their `quick_rank`. The first runs on any model.
    The others are left out where too little is left: the sentence stands under the position of the method.
    """
    fitted, left_out, left = list(methods), {}, QUICK_MATCHING_SECONDS
    ranked = sorted(range(len(methods)), key=lambda position: getattr(methods[position], "quick_rank", 0))
    for position in ranked:
        method = methods[position]
        if not step or not isinstance(method, Attack | TokenRecovery) or not isinstance(getattr(method, "steps", None), int):
            continue
        matching = getattr(method, "matches", "nothing") != "nothing"
        allowed = min(QUICK_SECONDS, left) if matching else QUICK_SECONDS
        cut = _with_steps_for(method, allowed / step)
        if cut is None and matching and left < QUICK_MATCHING_SECONDS:
            takes = (
                f"{FEWEST_STEPS} steps take about {duration(FEWEST_STEPS * step)} of one core, and the attacks before it took their share"
            )
            instead = f"attacks=[{method.name!r}] or the published budget runs it"
            left_out[position] = f"{method.name} left out of the quick audit: {takes}; {instead}"
            continue
        fitted[position] = cut or _with_steps_for(method, FEWEST_STEPS)
        left -= step * fitted[position].steps * getattr(fitted[position], "restarts", 1) if matching else 0.0
    return fitted, left_out


def _with_steps_for(method: Any, steps: float) -> Any | None:
    """The method with no more than so many steps over all starts, or with one start where that leaves too few; None where it is too few."""
    starts = getattr(method, "restarts", 1)
    if method.steps * starts <= steps:
        return method
    if steps >= FEWEST_STEPS * starts:
        return replace(method, steps=int(steps / starts))
    if steps < FEWEST_STEPS:
        return None
    return replace(method, steps=min(method.steps, int(steps)), **({"restarts": 1} if starts > 1 else {}))


def quick_training(method: Any, exposure: Exposure) -> tuple[Any | None, str]:
    """The method with as many epochs of its decoder's training as `QUICK_TRAINING_SECONDS` of one core allow, and what was cut.

    None stands for a method that is left out. On a GPU all epochs are quick.
    """
    cost = method.cost_of_training(exposure) if isinstance(method, DrawsWithDecoder) else None
    if cost is None or next(iter(exposure.update.values())).device.type != "cpu" or cost.seconds(method.epochs) <= QUICK_TRAINING_SECONDS:
        return method, ""
    allowed = int((QUICK_TRAINING_SECONDS - cost.features) / cost.epoch)
    takes = f"its decoder takes about {duration(cost.seconds(method.epochs))} of one core to train"
    if allowed < LEAST_SHARE_OF_EPOCHS * method.epochs:
        instead = f"attacks=[{method.name!r}] or the published budget trains it, and training_seconds= limits that"
        return None, f"{method.name} left out of the quick audit: {takes}; {instead}"
    return replace(method, epochs=allowed), f"{method.name} cut to {allowed} of {method.epochs} epochs of training: {takes}"


def quick_simulation(method: Any, step: float, exposure: Exposure) -> tuple[Any | None, str]:
    """The method with as much of its simulated clients as `QUICK_SIMULATION_SECONDS` allow, and what was cut.

    None stands for a method that is left out, where too little of them fits. On a GPU all of it is quick.
    """
    if next(iter(exposure.update.values())).device.type != "cpu":
        return method, ""
    if isinstance(method, RLU):
        each = step / FORWARDS_A_STEP / (exposure.public.batch_size or 1)  # seconds of one sample's forward pass
        probing, training = method.forwards(exposure)
        seconds = (probing + training) * each
        clients = method.simulations * method.rounds + 1
        allowed = int((QUICK_SIMULATION_SECONDS / each - training) / clients) if each else method.probes
        option, fewest, plural = "probes", FEWEST_PROBES, "labels"
        kept = f"{allowed} auxiliary samples as probes"
    elif isinstance(method, LearningToInvert):
        each = method.local_steps(exposure) * step / 2  # one pass forth and one back; a step of matching goes back twice
        seconds = method.simulations * each
        allowed = int(QUICK_SIMULATION_SECONDS / each) if each else method.simulations
        option, fewest, plural = "simulations", FEWEST_SIMULATIONS, "attacks"
        kept = f"{allowed} of {method.simulations} simulated updates"
    else:
        return method, ""
    if seconds <= QUICK_SIMULATION_SECONDS:
        return method, ""
    takes = f"its simulated clients take about {duration(seconds)} of one core"
    if allowed < fewest:
        return None, f"{method.name} left out of the quick audit: {takes}; {plural}=[{method.name!r}] or the published budget runs it"
    return replace(method, **{option: allowed}), f"{method.name} cut to {kept}: {takes}"


@dataclass
class Timetable:
    """The time of one audit: the limit, what the methods are expected to take, and what was cut."""

    limit: float | None = None  # seconds for the whole audit; None: as long as it takes
    began: float = field(default_factory=lambda: time.perf_counter())
    expected: dict[int, Forecast] = field(default_factory=dict)  # by the method's identity, since options may be unhashable
    cuts: list[str] = field(default_factory=list)
    beforehand: dict[int, str] = field(default_factory=dict)  # by the method's identity: why it is left out
    training_seconds: float | None = None  # of a decoder, once one was cut: the same for all, so that they share it

    def __post_init__(self) -> None:
        if self.limit is not None and not (isinstance(self.limit, (int, float)) and 0 < self.limit < math.inf):
            raise OptionError("max_seconds", f"expected a positive number of seconds, got {self.limit!r}")

    def time_steps(self, methods: Sequence[Recovery], exposure: Exposure, seed: int, tell: Callable[[str], None] | None = None) -> None:
        """Time one step of every method, until a tenth of the limit is gone. The others are timed when their turn comes.

        Without a limit a method whose long work comes before its first step is not timed: the trial would take as long as the method.
        """
        for method in methods:
            if self.limit is None and not getattr(method, "begins_with_steps", True):
                continue
            if self.limit is None or self.elapsed < 0.1 * self.limit:
                if tell and _takes_steps(method) and id(method) not in self.beforehand and not isinstance(method, Tampering):
                    tell(method.name)
                self.time_step(method, exposure, seed)

    def time_step(self, method: Recovery, exposure: Exposure, seed: int) -> None:
        if id(method) in self.beforehand or isinstance(method, Tampering):
            return
        known, fitted = self.expected.get(id(method)), self._with_shared_training(method)
        if known is None or (known.training and fitted is not method):
            self.expected[id(method)] = forecast(fitted, exposure, seed)

    def _with_shared_training(self, method: Any) -> Any:
        """The method with the decoder that was cut for another one."""
        if self.training_seconds is None or not isinstance(method, DrawsWithDecoder) or method.training_seconds is not None:
            return method
        return replace(method, training_seconds=self.training_seconds)

    def leave_out(self, method: Recovery, reason: str) -> None:
        """Leave a method out when its turn comes."""
        self.beforehand[id(method)] = reason

    def stop_if_late(self, done: int, steps: int) -> None:
        """End a method that still takes steps long after the limit."""
        if self.limit is not None and self.elapsed > STOPPED_AFTER * self.limit:
            raise OutOfTime(f"stopped after {done} of {steps} steps: max_seconds = {self.limit:g} had passed")

    @property
    def elapsed(self) -> float:
        return time.perf_counter() - self.began

    def seconds_for(self, methods: Sequence[Recovery]) -> float:
        """What the methods are expected to take, where known; the training of a decoder, which they share, counts once."""
        return sum(seconds for seconds in self._wanted(methods) if seconds < math.inf)

    def _wanted(self, methods: Sequence[Recovery]) -> list[float]:
        """The seconds of each method; infinite where nothing is known of a method with steps."""
        wanted, trained = [], self.training_seconds is not None
        for method in methods:
            mine = self._expected(method)
            wanted.append(math.inf if mine is None else mine.seconds - (mine.training if trained else 0.0))
            trained = trained or (mine is not None and mine.training > 0)
        return wanted

    def fit(self, method: Any, later: Sequence[Recovery]) -> tuple[Any | None, str]:
        """The method as it fits into the time that is left beside those that come later, and a sentence on what was cut.

        None stands for a method that is left out.
        """
        if id(method) in self.beforehand:
            return None, self._note(self.beforehand[id(method)])
        if self.limit is None:
            return method, ""
        left = self.limit - self.elapsed
        mine = self._expected(method) or Forecast()
        if left <= 0:
            return None, self._note(f"{method.name} left out: max_seconds = {self.limit:g} had passed")
        allowed = share_time(self._wanted([method, *later]), left)[0]
        fitted = cut_steps(self._with_shared_training(method), mine, allowed)
        if fitted is None:
            needs = f"it takes about {duration(mine.seconds)}, and max_seconds = {self.limit:g} leave it {duration(allowed)}"
            return None, self._note(f"{method.name} left out: {needs}")
        if fitted is method:
            return method, ""
        if mine.training:
            self.training_seconds = fitted.training_seconds
        training = getattr(fitted, "training_seconds", None)
        parts = [f"{training:.3g} s of training its decoder"] if training != getattr(method, "training_seconds", None) else []
        parts += [f"{fitted.steps} of {method.steps} steps"] if getattr(fitted, "steps", None) != getattr(method, "steps", None) else []
        return fitted, self._note(f"{method.name} cut to {' and '.join(parts)}, to keep max_seconds = {self.limit:g}")

    def _expected(self, method: Recovery) -> Forecast | None:
        """None where a method has steps or epochs and was not timed yet."""
        unknown = None if _takes_steps(method) and id(method) not in self.beforehand else Forecast()
        return self.expected.get(id(method), unknown)

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
