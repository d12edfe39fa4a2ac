"""The report's plain words: what a method, a metric, a null and a line of the threat model mean to a newcomer."""

from __future__ import annotations

import inspect
from typing import Any

from dosimeter.registry import DEFENSES, LOSSES, METRICS, TRAININGS, Registry
from dosimeter.surfaces.surface import surface_named, surfaces
from dosimeter.types import Record

NOT_MEASURED = "No record of this audit looks at this surface, so nothing is known about it."

# Key of the threat model -> its name on the page, and what a newcomer needs to know about it.
THREAT_MODEL = {
    "model": ("Model", "what the server sent to the client"),
    "parameters": ("Parameters", "numbers in one update"),
    "mode": ("Mode", "in training mode batch-norm layers mix the samples of a batch; in evaluation mode they do not"),
    "stage": ("Training stage", "updates of untrained and of trained models differ in what they give away"),
    "accuracy": ("Accuracy", "share of held-out samples that the model classifies rightly"),
    "data": ("Data", "where the private batch was drawn"),
    "round": ("Round", "of the federation"),
    "client": ("Client", "of the federation"),
    "framework": ("Framework", "what sent the update"),
    "truth": ("Private samples", "what the answers can be compared with; without them nothing is scored"),
    "classes": ("Classes", "kinds of sample that the model tells apart"),
    "input_shape": ("Shape of an input", ""),
    "inputs": ("Kind of inputs", ""),
    "batch_size": ("Batch size", "private samples behind one update; the fewer, the easier an attack"),
    "training": ("Client’s training", ""),
    "loss": ("Loss", ""),
    "defenses": ("Defenses", "the attacks know them: a defense must hold without being secret"),
    "labels": ("Labels came from", "an attack that is given the true labels is stronger than one that must find them"),
    "auxiliary": ("Auxiliary samples", "similar samples that the server is granted"),
    "needs": ("Used by the methods", "what the methods below rest on: without it they cannot run"),
}

OUTCOMES = {
    "completed": "ran to its end",
    "partial": "found a part; the rest is a guess",
    "ambiguous": "several answers fit equally well",
    "diverged": "left the finite numbers",
    "singular": "the equations do not determine the answer",
    "not attempted": "does not run here, so it says nothing",
    "impossible": "a theorem forbids it to every method",
    "crashed": "stopped by an error, so it says nothing",
}

_PARTS: dict[str, Registry[Any]] = {"training": TRAININGS, "loss": LOSSES, "defenses": DEFENSES}


def display_name(record: Record) -> str:
    """The method's name, with `adaptive` where it counters the defenses."""
    return f"{record.method}, adaptive" if record.config.get("adaptive") else record.method


def method_idea(surface: str, name: str) -> str:
    """The one-line idea of a method; empty for one that is not installed here."""
    return _idea(surface_named(surface).methods, name)


def part_idea(key: str, name: str) -> str:
    """The one-line idea of a training, a loss or a defense."""
    return _idea(_PARTS[key], name) if key in _PARTS else ""


def metric_idea(name: str) -> str:
    return _idea(METRICS, name)


def metric_name(name: str) -> str:
    return _of_metric(name, "title", "") or name.replace("_", " ")


def null_name(name: str) -> str:
    return null_words().get(name, (name.replace("_", " "), ""))[0]


def null_words() -> dict[str, tuple[str, str]]:
    """Every null of every surface: its name on the page, and what it means."""
    return {name: said for surface in surfaces() for name, said in surface.null_words.items()}


def higher_is_better(metric: str) -> bool:
    """The metric's direction; errors and distances of metrics that are not installed here count as lower-is-better."""
    worse = any(word in metric for word in ("error", "mse", "distance", "loss"))
    return bool(_of_metric(metric, "higher_is_better", not worse))


def unit(metric: str) -> str:
    return _of_metric(metric, "unit", "")


def is_share(metric: str) -> bool:
    """Whether a metric is a share, shown in per cent."""
    return _of_metric(metric, "is_share", False)


def enumeration(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _idea(registry: Registry[Any], name: str) -> str:
    if name not in registry:
        return ""
    return (inspect.getdoc(registry.entry(name)) or "").partition("\n")[0]


def _of_metric(name: str, attribute: str, unknown: Any) -> Any:
    """An attribute of a metric's class, or `unknown` for a metric that is not installed here."""
    return getattr(METRICS.entry(name), attribute, unknown) if name in METRICS else unknown
