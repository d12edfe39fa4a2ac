"""The ε that was typed and the ε that holds: what a privacy setting states, what is proved of it, and what a trial shows."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

from dosimeter.engines.privacy_trial import shown_epsilon
from dosimeter.interfaces import Defense, PrivacySetting
from dosimeter.numbers import THIN, significant
from dosimeter.options import PositiveInt, check_value, mismatch
from dosimeter.randomness import generator
from dosimeter.registry import DEFENSES, privacy
from dosimeter.runs.measurement import AuditedClient, Protocol
from dosimeter.types import PrivacyReading, Refused

TRIALS = 20_000
INFINITE = "∞"
UNMODELLED = "unmodelled"  # the defense of which there is no model
HEADINGS = ("for", "stated ε", "proved ε", "shown ε")


@dataclass(frozen=True, kw_only=True)
class DPGuarantee:
    """What a privacy setting states, what is proved and what a trial shows, side by side."""

    setting: PrivacySetting
    rounds: int
    readings: tuple[PrivacyReading, ...]
    caveats: tuple[str, ...]

    def __str__(self) -> str:
        rows = [HEADINGS, *(row(reading) for reading in self.readings)]
        widths = [max(len(line[column]) for line in rows) for column in range(len(HEADINGS))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths)).rstrip() for line in rows]
        return "\n".join([self.title, *lines, *self.sentences])

    @property
    def title(self) -> str:
        return f"{self.setting.name} ({self.setting.framework}), {count_rounds(self.rounds)}"

    @property
    def sentences(self) -> list[str]:
        """Why each ε holds, what it leaves a test of membership, and what the proofs leave out."""
        return [*(f"{row(reading)[0]}: {reading.reason}; {left_to_tests(reading)}" for reading in self.readings), *self.caveats]

    def as_table(self) -> list[dict[str, Any]]:
        """Plain data, one table a reading. An infinite ε is absent."""
        told = {"setting": self.setting.name, "rounds": self.rounds}
        return [told | {name: value for name, value in asdict(one).items() if value not in (None, math.inf)} for one in self.readings]


def dp_guarantee(
    setting: PrivacySetting | str | Any,
    *,
    rounds: int = 1,
    at_delta: float | None = None,
    trials: int = TRIALS,
    seed: int = 0,
    **options: Any,
) -> DPGuarantee:
    """The ε that was typed, the ε that holds after so many rounds, and the ε that a trial of the mechanism shows.

    `setting` is a name of `dosimeter list privacy` with its `options`, what `dm.privacy` returns, or a framework's own object: Flower's
    `LocalDpMod` or a strategy for differential privacy, an Opacus `PrivacyEngine` after its training, a privacy filter of NVIDIA FLARE.
    A trial draws what leaves for two neighbours, `trials` times each, and tells them apart. It can show no more than about ln(trials).
    """
    rounds = check_value(PositiveInt, rounds, "rounds")
    trials = check_value(PositiveInt, trials, "trials")
    if at_delta is not None and not 0 < at_delta < 1:
        raise mismatch("at_delta", "a number in (0, 1)", at_delta)
    known = privacy(setting, **options)
    readings = []
    for place, reading in enumerate(known.readings(rounds, at_delta)):
        drawn = known.trial(reading, rounds, trials, generator(seed, f"privacy trial {place}"))
        readings.append(reading if drawn is None else replace(reading, shown=shown_epsilon(*drawn, reading.delta)))
    return DPGuarantee(setting=known, rounds=rounds, readings=tuple(readings), caveats=known.caveats())


def row(reading: PrivacyReading) -> tuple[str, ...]:
    """The cells of a reading under `HEADINGS`."""
    shown = "–" if reading.shown is None else f"≥ {significant(reading.shown)}"
    stated = "none" if reading.stated is None else epsilon_text(reading.stated)
    change = "exchanged" if reading.change == "replaced" else reading.change
    return (f"a {reading.unit} {change}, against {reading.against}", stated, epsilon_text(reading.proved), shown)


def left_to_tests(reading: PrivacyReading) -> str:
    """At which δ the ε is, and what any test of membership can still do."""
    if reading.found == 1:
        return "a test may find every member"
    return f"δ is {significant(reading.delta)}, and at 1{THIN}% false alarms a test finds at most {significant(100 * reading.found)}{THIN}%"


def epsilon_text(value: float) -> str:
    return INFINITE if math.isinf(value) else significant(value)


def count_rounds(rounds: int) -> str:
    return "one round" if rounds == 1 else f"{rounds} rounds"


def with_guarantee(client: AuditedClient, setting: PrivacySetting | None, rounds: int) -> AuditedClient:
    """The client, whose description holds what the setting states, what is proved and what a trial shows."""
    if setting is None or "privacy" in client.description:
        return client
    behind = client.received is not None or UNMODELLED not in (name for name, _ in setting.declared(1.0))
    readings = [told | {"behind": behind} for told in dp_guarantee(setting, rounds=rounds).as_table()]
    return replace(client, description=client.description | {"privacy": readings})


def defenses_of(setting: PrivacySetting | None, client: AuditedClient, protocol: Protocol) -> tuple[Defense, ...]:
    """The protocol's defenses; where a client is simulated without any, what the setting does to its update, as far as there is a model."""
    if setting is None or client.received is not None or protocol.defenses:
        return protocol.defenses
    try:
        unit = protocol.training.unit(len(client.batch.inputs))
    except Refused:
        unit = 1.0  # a gradient is sent
    return tuple(DEFENSES.build(name, **options) for name, options in setting.declared(unit) if name != UNMODELLED)
