"""The report's plain words: what a surface, a verdict, a null and a line of the threat model mean to a newcomer."""

from __future__ import annotations

import inspect
from typing import Any

from dosimeter.registry import ATTACKS, DEFENSES, FEATURES, LABELS, LOSSES, METRICS, TRAININGS, Registry
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Record

SURFACES = {
    "labels": "Which classes the client’s samples belong to, and how many there are of each. A class can itself be the secret: "
    "a diagnosis, a purchase, a word that was typed.",
    "features": "The numbers that the model computes of each sample just before it decides. They identify a sample much as a fingerprint "
    "does: they can be compared, matched with known people, and often turned back into the sample.",
    "inputs": "The client’s samples themselves, rebuilt from what it sent.",
}

MEANINGS = {
    (
        "labels",
        Verdict.LEAKED,
    ): "Whoever runs the server can tell what kinds of samples this client holds from one update, without seeing any.",
    (
        "labels",
        Verdict.NOT_SHOWN,
    ): "What was tried here did no better than guessing. That is no proof: another method or a larger budget may do better.",
    (
        "labels",
        Verdict.IMPOSSIBLE,
    ): "None of the methods that were asked for can work in this setting. Another setting may open this surface again.",
    (
        "features",
        Verdict.LEAKED,
    ): "The server can compute the model’s inner description of single private samples, and compare or match them.",
    (
        "features",
        Verdict.NOT_SHOWN,
    ): "What was tried here came no closer to the private features than its nulls. That is no proof of safety.",
    (
        "features",
        Verdict.IMPOSSIBLE,
    ): "None of the methods that were asked for can work in this setting. Another setting may open this surface again.",
    (
        "inputs",
        Verdict.LEAKED,
    ): "The server can rebuild private samples from one update: closer to the truth than anything it could make without that update.",
    (
        "inputs",
        Verdict.NOT_SHOWN,
    ): "What was tried here came no closer to the private samples than its nulls. That is no proof: a longer or newer attack may.",
    (
        "inputs",
        Verdict.IMPOSSIBLE,
    ): "None of the attacks that were asked for can work in this setting. Another setting may open this surface again.",
}
NOT_MEASURED = "No record of this audit looks at this surface, so nothing is known about it."
ALL_CRASHED = "Every method on this surface was stopped by an error, so nothing is known about it."

METRIC_NAMES = {
    "clsacc": "ClsAcc",
    "insacc": "InsAcc",
    "leacc": "LeAcc",
    "lnacc": "LnAcc",
    "psnr": "PSNR",
    "ssim": "SSIM",
    "mse": "MSE",
    "lpips": "LPIPS",
    "label_l1": "label L1 error",
}

NULLS = {
    "prior": ("guessing", "labels guessed from how common each class is, averaged over many guesses"),
    "guess": ("guessing", "labels drawn at random, many times over: what luck alone gets right"),
    "mean": ("mean", "the average of the samples that the server already had: a blur that anyone can draw"),
    "gray": ("gray", "one even gray, which needs no knowledge at all"),
    "nearest": ("nearest known", "for each private sample, the most similar one that the server already had"),
    "foreign": ("foreign gradient", "the same attack fed another client’s update: what it invents by itself"),
    "foreign features": ("decoder, foreign features", "what the decoder draws from the features of samples that the server already had"),
    "mean feature": ("decoder, mean feature", "what the decoder draws from the mean of the features that the server already had"),
    "shuffled features": ("decoder, shuffled features", "what the decoder draws from the recovered features in random order"),
    "zero": ("zero", "a vector of zeros, which needs no knowledge at all"),
}

# Key of the threat model -> its name on the page, and what a newcomer needs to know about it.
THREAT_MODEL = {
    "model": ("Model", "what the server sent to the client"),
    "parameters": ("Parameters", "numbers in one update"),
    "mode": ("Mode", "in training mode batch-norm layers mix the samples of a batch; in evaluation mode they do not"),
    "stage": ("Training stage", "updates of untrained and of trained models differ in what they give away"),
    "accuracy": ("Accuracy", "share of held-out samples that the model classifies rightly"),
    "data": ("Data", "where the private batch was drawn"),
    "classes": ("Classes", "kinds of sample that the model tells apart"),
    "input_shape": ("Shape of an input", ""),
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
    "impossible": "refused before it ran",
    "crashed": "stopped by an error, so it says nothing",
}

_METHODS: dict[str, Registry[Any]] = {"labels": LABELS, "features": FEATURES, "inputs": ATTACKS}
_PARTS: dict[str, Registry[Any]] = {"training": TRAININGS, "loss": LOSSES, "defenses": DEFENSES}


def shown_name(record: Record) -> str:
    """The method, and whether it takes the defenses into account."""
    return f"{record.method}, adaptive" if record.config.get("adaptive") else record.method


def method_idea(surface: str, name: str) -> str:
    """The one-line idea of a method; empty for one that is not installed here."""
    return _idea(_METHODS[surface], name)


def part_idea(key: str, name: str) -> str:
    """The one-line idea of a training, a loss or a defense."""
    return _idea(_PARTS[key], name) if key in _PARTS else ""


def metric_idea(name: str) -> str:
    return _idea(METRICS, name)


def metric_name(name: str) -> str:
    return METRIC_NAMES.get(name, name.replace("_", " "))


def null_name(name: str) -> str:
    return NULLS[name][0] if name in NULLS else name.replace("_", " ")


def higher_is_better(metric: str) -> bool:
    """The metric's direction; errors and distances of metrics that are not installed here count as lower-is-better."""
    if metric in METRICS:
        return bool(getattr(METRICS.entry(metric), "higher_is_better", True))
    return not any(word in metric for word in ("error", "mse", "distance", "loss"))


def unit(metric: str) -> str:
    return str(getattr(METRICS.entry(metric), "unit", "")) if metric in METRICS else ""


def is_share(metric: str) -> bool:
    """Label accuracies are shares, shown in per cent."""
    return metric in METRICS and getattr(METRICS.entry(metric), "surface", "") == "labels" and higher_is_better(metric)


def enumeration(items: list[str]) -> str:
    return items[0] if len(items) == 1 else ", ".join(items[:-1]) + " and " + items[-1]


def _idea(registry: Registry[Any], name: str) -> str:
    if name not in registry:
        return ""
    return (inspect.getdoc(registry.entry(name)) or "").partition("\n")[0]
