"""What a score means: leaked, not shown at this budget, impossible here, or not measured; always with the reason."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from dosimeter.types import Outcome, Record

SURFACES = ("labels", "features", "inputs")
UTILITY = "utility"  # the surface of records that say what the defenses cost
CHANCE = 0.05  # the probability of luck at which labels count as leaked
MARGIN_DB = 3.0  # a picture must beat each of its nulls by as much to count as leaked


class Verdict(StrEnum):
    LEAKED = "leaked"
    NOT_SHOWN = "not shown at this budget"
    IMPOSSIBLE = "impossible here"
    NOT_MEASURED = "not measured"  # of a method that an error stopped: it has no say on its surface


@dataclass(frozen=True, kw_only=True)
class SurfaceVerdict:
    """The verdict on one surface, carried by its most telling record."""

    surface: str
    verdict: Verdict
    reason: str
    method: str  # of that record, "" where there is none


Values = Sequence[float | None]


def judge_labels(
    found: Mapping[str, Values], nulls: Mapping[str, Mapping[str, Values]], chance: float, certified: bool, attempts: int = 1
) -> tuple[Verdict, str]:
    """Labels leaked where they are proved, or recovered beyond chance.

    `chance` is how often luck agrees as well as the estimate does (see scoring); with several methods tried it is multiplied
    by their number (Bonferroni), so that the best of many cannot win by luck.
    """
    share = f"{_number(found['insacc'][0]):.0%} of the labels recovered (InsAcc), guessing gives {_number(nulls['prior']['insacc'][0]):.0%}"
    if certified:
        return Verdict.LEAKED, f"{share}; proved from the gradient alone"
    corrected = min(1.0, chance * attempts)
    luck = f"by luck with probability {corrected:.2g}" + (f", counting {attempts} methods tried" if attempts > 1 else "")
    if corrected <= CHANCE:
        return Verdict.LEAKED, f"{share}; as much agreement comes {luck}"
    return Verdict.NOT_SHOWN, f"{share}; as much agreement comes {luck}, so this batch does not tell a leak from luck"


def judge_features(
    found: Mapping[str, Values], nulls: Mapping[str, Mapping[str, Values]], certified: int, refuted: int = 0
) -> tuple[Verdict, str]:
    """Features leaked where one is certified, or where most errors lie below every null's."""
    errors = [_number(value, math.inf) for value in found.get("feature_error", ())]
    if not errors:
        unmeasured = "their error cannot be measured, since the client's own features cannot be computed again"
        return (
            Verdict.LEAKED if certified else Verdict.NOT_SHOWN
        ), f"{certified} feature vectors certified from the gradient alone; {unmeasured}"
    middle = _median(errors)
    if refuted:
        return Verdict.NOT_SHOWN, f"{refuted} of {certified} certificates are refuted by the truth: do not trust this run, and report it"
    if certified:
        return (
            Verdict.LEAKED,
            f"{certified} of {len(errors)} feature vectors certified from the gradient alone; median relative error {middle:.2g}",
        )
    null_medians = [_median([_number(v, math.inf) for v in null["feature_error"]]) for null in nulls.values() if "feature_error" in null]
    floor = min(null_medians, default=1.0)  # 1: the error of the zero vector
    if middle < 0.5 * min(floor, 1.0):
        return Verdict.LEAKED, f"median relative feature error {middle:.2g}, the best null has {floor:.2g}"
    return Verdict.NOT_SHOWN, f"median relative feature error {middle:.2g} against {floor:.2g} of the best null"


def judge_inputs(found: Mapping[str, Values], nulls: Mapping[str, Mapping[str, Values]]) -> tuple[Verdict, str]:
    """Inputs leaked where pictures beat each of their own nulls by a margin that is seen, not by luck of the average."""
    psnr = [_number(value, -math.inf) for value in found["psnr"]]
    rivals = [[_number(value, -math.inf) for value in null["psnr"]] for null in nulls.values()]
    best = [max(column) for column in zip(*rivals)]
    above = sum(value >= rival + MARGIN_DB for value, rival in zip(psnr, best))
    given = [(value, rival) for value, rival in zip(psnr, best) if value > -math.inf]  # an attack may give back some inputs only
    if not given:
        return Verdict.NOT_SHOWN, f"none of {len(psnr)} inputs came back"
    middle, rival = (_median(column) for column in zip(*given))
    figures = f"median PSNR {middle:.1f} dB against {rival:.1f} dB of each input's best null"
    if len(given) < len(psnr):
        figures = f"{len(given)} came back, {figures}"
    if above:
        return Verdict.LEAKED, f"{above} of {len(psnr)} inputs beat every null by {MARGIN_DB:g} dB or more; {figures}"
    return Verdict.NOT_SHOWN, f"no input beats its nulls by {MARGIN_DB:g} dB; {figures}"


def judge_surfaces(records: Iterable[Record]) -> list[SurfaceVerdict]:
    """For each surface, the gravest verdict among its records, with that record's reason; a crashed method has none."""
    by_surface: dict[str, list[Record]] = {surface: [] for surface in SURFACES}
    for record in records:
        if record.outcome != Outcome.CRASHED and record.surface in by_surface:
            by_surface[record.surface].append(record)
    return [_judge_surface(surface, group) for surface, group in by_surface.items() if group]


def _judge_surface(surface: str, group: list[Record]) -> SurfaceVerdict:
    worst = max(group, key=gravity)
    if worst.verdict != Verdict.IMPOSSIBLE:
        return SurfaceVerdict(surface=surface, verdict=Verdict(worst.verdict), reason=worst.reason, method=worst.method)
    reasons = "; ".join(dict.fromkeys(record.reason for record in group))
    reason = reasons if len(group) == 1 else f"none of {len(group)} methods can run in this threat model: {reasons}"
    return SurfaceVerdict(surface=surface, verdict=Verdict.IMPOSSIBLE, reason=reason, method=worst.method if len(group) == 1 else "")


def gravity(record: Record) -> tuple[int, bool, float]:
    """How much a record shows, to rank records of one surface: by verdict, by proof, then by score; larger is worse for the client."""
    order = [Verdict.NOT_MEASURED, Verdict.IMPOSSIBLE, Verdict.NOT_SHOWN, Verdict.LEAKED]
    sign, metric = {"labels": (1, "insacc"), "features": (-1, "feature_error"), "inputs": (1, "psnr")}[record.surface]
    values = [_number(value, -sign * math.inf) for value in record.metrics.get(metric, [])]
    return order.index(Verdict(record.verdict)), bool(record.details.get("certified")), sign * _median(values) if values else -math.inf


def _number(value: float | None, missing: float = math.nan) -> float:
    return missing if value is None or math.isnan(value) else value


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
