"""An audit as the pipeline would record it: real pictures, scores computed from them, two settings, every verdict."""

import base64
import dataclasses
import io
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from dosimeter.config import digest
from dosimeter.types import Record

SAMPLES, CLASSES = 8, 10


@pytest.fixture(scope="session")
def audit_records() -> list[Record]:
    """Without a defense all surfaces are audited; with noise, labels and inputs once more."""
    bare = [
        label_record(
            "idlg", 0.6, 0.7, verdict="leaked", reason="60% of the labels recovered (InsAcc); guessing does as well in 0.8% of draws"
        ),
        label_record(
            "ilrg",
            1.0,
            1.0,
            verdict="leaked",
            reason="100% of the labels recovered (InsAcc); guessing does as well in less than 0.1% of draws",
        ),
        feature_record(),
        refused_record(),
        input_record("inverting_gradients", noise=0.05, labels="recovered by ilrg"),
        input_record("dlg", noise=0.6, labels="optimised"),
    ]
    noisy = [
        label_record(
            "ilrg",
            0.2,
            0.3,
            verdict="not shown at this budget",
            reason="20% of the labels recovered (InsAcc), which guessing reaches in 61.0% of draws",
            std=0.1,
        ),
        input_record("inverting_gradients", noise=0.5, labels="recovered by ilrg", std=0.1),
    ]
    return bare + noisy


@pytest.fixture(scope="session")
def single_setting(audit_records: list[Record]) -> list[Record]:
    return audit_records[:6]


@pytest.fixture(scope="session")
def make_record() -> Callable[..., Record]:
    return record


@pytest.fixture(scope="session")
def make_label_record() -> Callable[..., Record]:
    return label_record


@pytest.fixture(scope="session")
def make_input_record() -> Callable[..., Record]:
    return input_record


@pytest.fixture(scope="session")
def make_cost() -> Callable[..., Record]:
    return grid_cost


@pytest.fixture(scope="session")
def make_inputs() -> Callable[..., Record]:
    return grid_inputs


@pytest.fixture(scope="session")
def make_labels() -> Callable[..., Record]:
    return grid_labels


@pytest.fixture(scope="session")
def grid_records() -> list[Record]:
    """A grid of two defenses: three of four inputs leak without, one behind pruning, none behind noise; noise costs accuracy."""
    pruned, noisy = [{"name": "pruning", "ratio": 0.9}], [{"name": "gaussian_noise", "std": 0.1}]
    return [
        grid_inputs([], [30.0, 30.0, 30.0, 14.0], "leaked"),
        grid_cost([], 0.9, 1.0),
        grid_inputs(pruned, [30.0, 11.0, 11.0, None], "leaked"),
        grid_cost(pruned, 0.89, 0.99),
        grid_inputs(noisy, [11.0] * 4, "not shown at this budget"),
        grid_cost(noisy, 0.6, 0.667, guarantees=[{"epsilon": 3.0, "delta": 1e-5, "unit": "client", "source": "x"}]),
    ]


def record(surface: str, method: str, std: float | None = None, labels: str = "given", seed: int = 0, **fields: Any) -> Record:
    defenses = [] if std is None else [{"name": "gaussian_noise", "std": std}]
    threat_model = {
        "model": "small_cnn",
        "parameters": 61706,
        "mode": "eval",
        "accuracy": 0.913,
        "accuracy_on": "126 held-out images",
        "model_hash": "6b189d33e3280f1e",
        "batch_hash": "1d51d756bbdec7cc",
        "stage": "trained for 2 epochs",
        "data": "photographs, patches of 32 × 32",
        "classes": CLASSES,
        "input_shape": [3, 32, 32],
        "batch_size": SAMPLES,
        "batch_size_declared": True,
        "labels": labels,
        "auxiliary": 64,
        "training": {"name": "fedsgd"},
        "loss": {"name": "cross_entropy", "smoothing": 0.0},
        "defenses": defenses,
        "needs": ["head gradient", "head bias gradient", "batch size"] if surface == "labels" else ["gradient of every layer", "labels"],
    }
    config = {"method": {"name": method, "steps": 2000}, "defenses": defenses, "labels": labels, "seed": seed}
    defaults: dict[str, Any] = {
        "key": digest([surface, config]),
        "config": config,
        "metrics": {},
        "nulls": {},
        "outcome": "completed",
        "verdict": "not shown at this budget",
        "reason": "",
        "warnings": [],
        "seconds": 1.25,
        "versions": {"dosimeter": "0.1.0", "torch": "2.13.0", "python": "3.11.9"},
    }
    return Record(surface=surface, method=method, seed=seed, threat_model=threat_model, **(defaults | fields))


def label_record(method: str, instances: float, classes: float, std: float | None = None, seed: int = 0, **fields: Any) -> Record:
    rng = np.random.default_rng(3)
    true = np.bincount(rng.integers(0, CLASSES, SAMPLES), minlength=CLASSES)
    guesses = np.stack([np.bincount(rng.integers(0, CLASSES, SAMPLES), minlength=CLASSES) for _ in range(500)])  # (500, C)
    jaccard = np.minimum(guesses, true).sum(1) / np.maximum(guesses, true).sum(1)
    sets = ((guesses > 0) & (true > 0)).sum(1) / ((guesses > 0) | (true > 0)).sum(1)
    return record(
        "labels",
        method,
        std=std,
        seed=seed,
        labels="",
        metrics={"insacc": [instances], "clsacc": [classes], "leacc": [0.9], "lnacc": [0.8]},
        nulls={"prior": {"insacc": [float(jaccard.mean())], "clsacc": [float(sets.mean())], "leacc": [0.7], "lnacc": [0.7]}},
        seconds=0.02,
        details={"certified": False},
        **fields,
    )


def feature_record() -> Record:
    rng = np.random.default_rng(4)
    return record(
        "features",
        "subspace",
        metrics={
            "feature_error": [*(10 ** rng.uniform(-6, -4, SAMPLES - 1)).tolist(), None],
            "feature_cosine": [1.0] * (SAMPLES - 1) + [None],
        },
        nulls={
            "mean": {"feature_error": rng.uniform(0.5, 0.9, SAMPLES).tolist()},
            "foreign": {"feature_error": rng.uniform(0.8, 1.4, SAMPLES).tolist()},
        },
        verdict="leaked",
        outcome="partial",
        reason="7 of 8 feature vectors certified from the gradient alone; median relative error 2.1e-05",
        details={
            "certified": 7,
            "false_certificates": 0,
            "batch_size": 8,
            "complete": False,
            "identifiability": ["The head’s gradient has rank 8 of at most 10: single samples can be told apart."],
        },
        warnings=["one sample shares its class with another and could not be separated"],
    )


def refused_record() -> Record:
    return record(
        "features",
        "direct",
        outcome="not attempted",
        verdict="not attempted",
        reason="direct needs a batch of one; this batch has 8",
        seconds=0.0,
    )


def input_record(method: str, noise: float, labels: str, std: float | None = None, seed: int = 0) -> Record:
    rng = np.random.default_rng(5 + seed)
    truth, known, mean = patches()
    recovered = np.clip(truth + noise * rng.uniform(0.2, 1.6, (SAMPLES, 1, 1, 1)) * rng.standard_normal(truth.shape), 0, 1)
    nearest = known[((truth[:, None] - known[None]) ** 2).mean((2, 3, 4)).argmin(1)]
    foreign = np.clip(known[:SAMPLES] + 0.2 * rng.standard_normal(truth.shape), 0, 1)
    rivals = {"mean": np.broadcast_to(mean, truth.shape), "nearest": nearest, "foreign": foreign}
    found = psnr(recovered, truth)
    nulls = {name: {"psnr": psnr(images, truth), "mse": mse(images, truth)} for name, images in rivals.items()}
    best = [max(null["psnr"][i] for null in nulls.values()) for i in range(SAMPLES)]
    above = sum(value >= rival + 3 for value, rival in zip(found, best))
    figures = f"median PSNR {np.median(found):.1f} dB against {np.median(best):.1f} dB of the best null"
    return record(
        "inputs",
        method,
        std=std,
        seed=seed,
        labels=labels,
        metrics={"psnr": found, "mse": mse(recovered, truth)},
        nulls=nulls,
        verdict="leaked" if above else "not shown at this budget",
        reason=f"{above} of {SAMPLES} inputs beat every null by 3 dB or more; {figures}"
        if above
        else f"no input beats its nulls by 3 dB; {figures}",
        seconds=21.4,
        details={"objective": 0.0213, "objective_at_truth": 0.0007, "restarts": [0.03, 0.0213]},
        warnings=["the objective at the true batch is lower than the attack’s: the attack was under-optimised"],
        evidence=[
            {
                "kind": "image",
                "sample": i,
                "private": png(truth[i]),
                "recovered": png(recovered[i]),
                "nulls": {name: png(images[i]) for name, images in rivals.items()},
                "score": found[i],
            }
            for i in range(SAMPLES)
        ],
    )


def patches() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Private patches of a photograph, patches that the server has, and the mean of those."""
    from sklearn.datasets import load_sample_image

    image = load_sample_image("flower.jpg")[::3, ::3].astype(float) / 255
    tiles = np.stack([image[y : y + 32, x : x + 32] for y in range(0, 128, 32) for x in range(0, 192, 32)])
    return tiles[6:14], np.concatenate([tiles[:6], tiles[14:]]), tiles.mean(0)


def mse(images: np.ndarray, truth: np.ndarray) -> list[float]:
    return ((images - truth) ** 2).mean((1, 2, 3)).tolist()


def psnr(images: np.ndarray, truth: np.ndarray) -> list[float]:
    return (-10 * np.log10(mse(images, truth))).tolist()


def png(image: np.ndarray) -> str:
    from PIL import Image

    file = io.BytesIO()
    Image.fromarray((image * 255).astype(np.uint8)).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


GRID_RECORD = Record(
    key="k",
    config={"subject": {}},
    surface="utility",
    method="federated training",
    seed=0,
    threat_model={},
    metrics={},
    nulls={},
    outcome="completed",
    verdict="",
    reason="",
    warnings=[],
    seconds=1.0,
    versions={},
)


def grid_cost(defenses, accuracy, kept, **details):
    metrics = {"accuracy": [accuracy], "accuracy_kept": [kept], "bytes_ratio": [0.5], "time_ratio": [1.5], "epsilon": [None]}
    return dataclasses.replace(GRID_RECORD, key=f"u{defenses}", threat_model={"defenses": defenses}, metrics=metrics, details=details)


def grid_inputs(defenses, psnr, verdict, method="dlg"):
    nulls = {"mean": {"psnr": [10.0] * len(psnr)}, "foreign": {"psnr": [12.0] * len(psnr)}}
    threat_model = {"defenses": defenses, "labels": "given", "needs": []}
    return dataclasses.replace(
        GRID_RECORD,
        key=f"i{defenses}{method}",
        surface="inputs",
        method=method,
        threat_model=threat_model,
        metrics={"psnr": psnr},
        nulls=nulls,
        verdict=verdict,
    )


def grid_labels(found, chance, method="ilrg", seed=0, **details):
    return dataclasses.replace(
        GRID_RECORD,
        key=f"l{method}{seed}",
        surface="labels",
        method=method,
        seed=seed,
        config={"subject": {"batch_hash": seed}, "seed": seed, "labels": method},
        threat_model={"defenses": [], "batch_size": 4},
        metrics={"insacc": [found]},
        nulls={"prior": {"insacc": [0.5]}},
        verdict="not shown at this budget",
        details={"chance": chance, **details},
    )
