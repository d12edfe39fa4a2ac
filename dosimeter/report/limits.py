"""The figure of a surface's limits: what is proved, what was shown and what no attacker can exceed, sample by sample, in words too."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dosimeter.numbers import THIN, percent, power_of_ten, significant
from dosimeter.report.plots import HEIGHT, Scale, Tick, level_text, round_step
from dosimeter.report.scores import score
from dosimeter.report.words import enumeration, higher_is_better, is_share, metric_name
from dosimeter.surfaces.limits import CLOSED_DB, Limits
from dosimeter.surfaces.surface import surface_named

WHOLE_PICTURE_DB = 60.0  # beyond it every grey level of an 8-bit picture is right; larger values stand at the edge
MOST_RANKED = 3  # of the samples that are most exposed
SMALLEST_POWER = -8  # of ten: smaller errors stand at the edge


@dataclass(frozen=True, kw_only=True)
class Marks:
    """One sample: its three marks, in pixels from the top."""

    number: int
    across: float  # per cent
    proved: float | None
    shown: float | None
    ceiling: float | None
    title: str


@dataclass(frozen=True, kw_only=True)
class LimitsPlot:
    columns: list[Marks]
    ticks: list[Tick]  # pixels from the top
    axis: str
    height: float
    ceiling_name: str  # of the mark, in the key; "" where no ceiling is known
    proved: bool  # whether any sample has the mark of a proof
    sentence: str
    assumptions: str
    summary: str  # for screen readers


def limits_plot(limits: Limits) -> LimitsPlot:
    """The three marks of every sample on one scale. Up the page means more leaked."""
    down = _axis(limits)
    count = len(limits.shown)
    columns = [
        Marks(
            number=place + 1,
            across=100 * (place + 0.5) / count,
            proved=down(proved),
            shown=down(shown),
            ceiling=down(top),
            title=_title(limits, place),
        )
        for place, (proved, shown, top) in enumerate(zip(limits.proved, limits.shown, limits.ceiling))
    ]
    return LimitsPlot(
        columns=columns,
        ticks=_ticks(limits, down),
        axis=metric_name(limits.metric),
        height=HEIGHT,
        ceiling_name=_ceiling_name(limits),
        proved=any(value is not None for value in limits.proved),
        sentence=" ".join(filter(None, [limits_sentence(limits), identification_sentence(limits), exposure_sentence(limits)])),
        assumptions=" ".join(limits.assumptions),
        summary=f"Proved, shown and ceiling of {count} values of {metric_name(limits.metric)}. {limits_sentence(limits)}",
    )


def limits_sentence(limits: Limits) -> str:
    """Whether anything is left to find, and else by how much shown and ceiling are apart."""
    metric, count = limits.metric, len(limits.shown)
    if limits.proved and all(value is not None for value in limits.proved):
        return _all_proved(limits)
    top, shown, gap = limits.mean_ceiling, limits.mean_shown, limits.gap
    if top is None:
        return "No ceiling is known here" + (f": {'; '.join(limits.refusals)}." if limits.refusals else ".")
    if shown is None:
        return f"Nothing came back, and the ceiling is {score(top, metric)} ({_kind(limits)})."
    if gap is None or not limits.bound:  # the metric itself ends there
        sure = sum(value is not None for value in limits.proved)
        known = f"{sure} of {count} values are proved" if sure else "nothing is proved"
        end = "All of it was recovered" if limits.closed else f"{limits.method} reaches {score(shown, metric)}"
        why = f": {'; '.join(limits.refusals)}" if limits.refusals else ""
        return f"{end}; {known}, and no bound below exact recovery is known{why}."
    if top >= WHOLE_PICTURE_DB > shown:
        beyond = f"the ceiling is beyond {score(WHOLE_PICTURE_DB, metric)} ({_kind(limits)})"
        return f"{limits.method} reaches {score(shown, metric)} {_mean(metric)}, and {beyond}: nothing is known that stops a better attack."
    figures = f"{limits.method} reaches {score(shown, metric)} {_mean(metric)}, and the ceiling is {score(top, metric)} ({_kind(limits)})"
    if gap < -CLOSED_DB:
        return (
            f"{figures}: the attack is {score(-gap, metric)} better. The ceiling is a mean over inputs like the auxiliary samples, "
            "and these samples are easier."
        )
    if limits.closed:
        return f"Nothing is left to find{'' if is_share(metric) else f', within {CLOSED_DB:g}{THIN}dB'}: {figures}."
    if gap < 0 and is_share(metric):
        return f"{figures}: the ceiling is a mean over the noise, about which one batch scatters."
    return f"A better attack may gain {score(gap, metric)}: {figures}."


def _all_proved(limits: Limits) -> str:
    """Every value is proved. A share below all is one of which the rest leaves no trace in the update."""
    of_what, count = surface_named(limits.surface).headline_covers, len(limits.shown)
    left = f"Nothing is left to find{f' in {of_what}' if of_what else ''}"
    if is_share(limits.metric) and any(value is not None and value < 1 for value in limits.proved):
        return f"{left}: what the update holds of it is proved, and the rest leaves no trace in the update."
    whole = "all of it" if of_what else "everything" if count == 1 else f"each of {count} values"
    return f"{left}: {whole} is proved from the update."


def identification_sentence(limits: Limits) -> str:
    """How often an attacker who knows all but the sample picks it among candidates, beside the bound and ε; "" without such a bound."""
    facts = limits.identification
    chance, top = facts.get("chance"), facts.get("high")
    if not isinstance(chance, float) or not isinstance(top, float) or chance <= 0:
        return ""
    shown = facts.get("attack")
    whom = f"An attacker who knows all but which of {round(1 / chance)} candidates a sample is"
    finds = (
        f"{whom} picks it in {percent(shown)} of the cases, and none can in more than"
        if isinstance(shown, float)
        else f"{whom} picks it in at most"
    )
    spent = facts.get("epsilon")
    epsilon = enumeration([f"{significant(value)} ({name})" for name, value in spent.items()]) if isinstance(spent, dict) and spent else ""
    budget = f"; ε at δ {significant(facts.get('delta', 0.0))} is {epsilon}" if epsilon else ""
    rounds = facts.get("steps", 1)
    return f"{finds} {percent(top)}, over {rounds} round{'s' if rounds != 1 else ''} (reconstruction_robustness, proved{budget})."


def exposure_sentence(limits: Limits) -> str:
    """Which samples the update tells most of; "" where nothing says so."""
    if len(limits.bits) < 2:
        return ""
    ranked = sorted(range(len(limits.bits)), key=lambda place: -limits.bits[place])
    said = [f"sample {place + 1} ({significant(limits.bits[place])} bits)" for place in ranked]
    first, last = said[: min(MOST_RANKED, len(said) - 1)], said[-1]
    return f"By mutual information, as if the update were linear, it tells most of {', then '.join(first)}, and least of {last}."


def ceiling_text(value: float | None, *, unknown: str = "none known") -> str:
    """The PSNR that no attacker exceeds: a number, beyond what a picture needs, or not known."""
    if value is None:
        return unknown
    return f"≥{WHOLE_PICTURE_DB:g}{THIN}dB" if value >= WHOLE_PICTURE_DB else score(value, "psnr")


def _mean(metric: str) -> str:
    """What the number of several samples is: ceilings on a PSNR limit a mean error, so it is no median."""
    return "over all samples" if is_share(metric) else "by the mean error of all samples"


def _kind(limits: Limits) -> str:
    return f"{limits.bound}, {'proved' if limits.theorem else 'an estimate'}"


def _ceiling_name(limits: Limits) -> str:
    if all(value is None for value in limits.ceiling):
        return ""
    return f"ceiling: {_kind(limits)}" if limits.bound else "ceiling: exact recovery, since no lower one is known"


def _title(limits: Limits, place: int) -> str:
    said = {"proved": limits.proved[place], "shown": limits.shown[place], "ceiling": limits.ceiling[place]}
    values = [f"{name} {score(value, limits.metric)}" for name, value in said.items() if value is not None]
    shown, top = said["shown"], said["ceiling"]
    apart = None if shown is None or top is None or not limits.bound else top - shown
    gap = "" if apart is None else f"; {'closed' if abs(apart) <= CLOSED_DB else f'{score(abs(apart), limits.metric)} apart'}"
    return f"{place + 1}: {', '.join(values) or 'nothing'}{gap}"


def _scale(limits: Limits) -> Scale:
    if is_share(limits.metric):
        return Scale(low=0, high=1)
    if not higher_is_better(limits.metric):
        return Scale(low=10.0**SMALLEST_POWER, high=1.0, logarithmic=True)
    values = [
        min(value, WHOLE_PICTURE_DB) for column in (limits.proved, limits.shown, limits.ceiling) for value in column if value is not None
    ]
    step = round_step(max(values) - min(values)) if values else 1.0
    low, high = (step * math.floor(min(values) / step), step * math.ceil(max(values) / step)) if values else (0.0, step)
    return Scale(low=low, high=high if high > low else low + step)


def _axis(limits: Limits):
    scale, up = _scale(limits), higher_is_better(limits.metric)

    def down(value: float | None) -> float | None:
        if value is None:
            return None
        share = scale.at(value)
        return round(HEIGHT * (1 - share if up else share), 1)

    return down


def _ticks(limits: Limits, down) -> list[Tick]:
    scale = _scale(limits)
    if scale.logarithmic:
        return [
            Tick(down(10.0**power), ("≤" if power == SMALLEST_POWER else "") + power_of_ten(power)) for power in range(SMALLEST_POWER, 1, 2)
        ]
    step = round_step(scale.high - scale.low)
    levels = [scale.low + step * i for i in range(round((scale.high - scale.low) / step) + 1)]
    if is_share(limits.metric):
        return [Tick(down(value), score(value, limits.metric)) for value in levels]
    texts = [level_text(value, limits.metric, value == levels[-1]) for value in levels]
    return [Tick(down(value), f"≥{text}" if value == WHOLE_PICTURE_DB else text) for value, text in zip(levels, texts)]
