"""Batches with known features, and how far a recovery is from them; shared by head.py and head_campaign.py."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.models.loading import load_model
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.types import FeatureEstimate

CERTIFIABLE = 1e-2  # the largest feature error, and the largest L1 error of a soft label, that a certificate may stand for


@dataclass(frozen=True)
class Case:
    """An exposure and the truth behind it."""

    exposure: Exposure
    features: Tensor  # (B, H) float64
    labels: Tensor  # (B,) class ids, or (B, C) soft labels


def observed(model: nn.Module, inputs: Tensor, labels: Tensor, **options: Any) -> Case:
    exposure = dm.observe(model, dm.Batch(inputs, labels), **options)
    return Case(exposure, input_of(model, find_head(exposure).name, inputs).double(), labels)


def build(
    size: int,
    classes: int,
    features: int,
    *,
    seed: int,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    train: bool = True,
    gain: float = 1.0,
    labels: Tensor | None = None,
    **options: Any,
) -> Case:
    """A batch of random inputs with random labels in an untrained network; `gain` scales its head, which makes it confident."""
    rng = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        body, head = (nn.Linear(256, features), nn.BatchNorm1d(features), nn.ReLU()), nn.Linear(features, classes)
    with torch.no_grad():
        head.weight.mul_(gain)
    model = nn.Sequential(*body, head).to(device=device, dtype=dtype).train(train)
    drawn = torch.randint(0, classes, (size,), generator=rng)
    inputs = torch.rand(size, 256, generator=rng).to(device=device, dtype=dtype)
    return observed(model, inputs, (drawn if labels is None else labels).to(device), **options)


def photographs(
    folder: Path,
    network: str,
    labels: Tensor,
    classes: int,
    *,
    seed: int,
    dtype: torch.dtype = torch.float32,
    train: bool = True,
    **options: Any,
) -> Case:
    """Real 32-pixel images with the given labels in an untrained residual net."""
    arrays = np.load(folder / "cifar100.npz")
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(arrays["train_images"]), generator=rng)[: len(labels)]
    inputs = torch.from_numpy(arrays["train_images"][chosen.numpy()]).permute(0, 3, 1, 2).to(dtype) / 255
    model = load_model(network, {"classes": classes}, None, seed).to(dtype).train(train)
    return observed(model, inputs, labels, **options)


def trained(
    folder: Path, size: int, *, seed: int, train: bool, dtype: torch.dtype = torch.float32, wrong: float = 0.3, **options: Any
) -> Case:
    """Training images of the CIFAR-10 ResNet-20, cropped and flipped at random as it was trained, a part of them mislabelled."""
    arrays = np.load(folder / "cifar10.npz")
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(arrays["train_images"]), generator=rng)[:size].numpy()
    images = torch.from_numpy(arrays["train_images"][chosen]).permute(0, 3, 1, 2).to(dtype) / 255
    mean, std = torch.tensor([0.485, 0.456, 0.406], dtype=dtype), torch.tensor([0.229, 0.224, 0.225], dtype=dtype)
    padded = pad(images, (4, 4, 4, 4))
    rows, columns = (torch.randint(0, 9, (size,), generator=rng).tolist() for _ in range(2))
    crops = torch.stack([image[:, row : row + 32, column : column + 32] for image, row, column in zip(padded, rows, columns)])
    flipped = torch.rand(size, generator=rng) < 0.5
    crops[flipped] = crops[flipped].flip(3)
    labels = torch.from_numpy(arrays["train_labels"][chosen]).long()
    shifted = (labels + torch.randint(1, 10, (size,), generator=rng)) % 10
    labels = torch.where(torch.rand(size, generator=rng) < wrong, shifted, labels)
    weights = folder / "weights" / "cifar10_resnet20-12fca82f.th"
    model = load_model("resnet20", {"classes": 10}, weights, 0).to(dtype).train(train)
    scale = dm.Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))
    return observed(model, (crops - mean.view(3, 1, 1)) / std.view(3, 1, 1), labels, normalization=scale, **options)


def errors(found: FeatureEstimate, case: Case) -> Tensor:
    """Relative feature errors under the best one-to-one assignment of samples whose labels agree; infinite where there is none."""
    distance = torch.cdist(found.features.double(), case.features, compute_mode="donot_use_mm_for_euclid_dist")
    relative = (distance / torch.linalg.vector_norm(case.features, dim=1)).cpu()
    relative = torch.where(_labels_agree(found, case).cpu(), relative, torch.inf)
    rows, columns = linear_sum_assignment(relative.clamp_max(1e9).numpy())
    result = torch.full((len(found.features),), torch.inf, dtype=torch.float64)
    result[torch.from_numpy(rows)] = relative[rows, columns]
    return result


def _labels_agree(found: FeatureEstimate, case: Case) -> Tensor:
    """Whether each label found is that of each true sample, to `CERTIFIABLE` in L1 where labels are soft: (n, B)."""
    if case.labels.ndim == 1 and found.soft is None:
        return found.labels[:, None] == case.labels
    classes, loss = case.exposure.public.classes, case.exposure.public.loss
    assert isinstance(loss, dm.CrossEntropy)
    true = loss.smooth_targets(case.labels, classes, torch.float64)
    given = one_hot(found.labels, classes) if found.soft is None else found.soft
    return torch.cdist(given.double(), true, p=1) <= CERTIFIABLE


def outcome(found: FeatureEstimate, case: Case) -> dict[str, Any]:
    error = errors(found, case)
    certified, bar = found.certified.cpu(), found.error_bar.cpu().double() if found.error_bar is not None else torch.zeros(len(error))
    return {
        "samples": len(case.labels),
        "certified": int(certified.sum()),
        "false_certificates": int((certified & ((error > bar) | (error > CERTIFIABLE))).sum()),
        "median_error": float(error.median()) if len(error) else math.inf,
        "largest_error": float(error.max()) if len(error) else math.inf,
        "complete": found.complete,
    }


def top_probability(case: Case) -> float:
    """The mean of the largest probability that the model gives a sample."""
    return float(torch.softmax(find_head(case.exposure).logits(case.features), 1).amax(1).mean())


def timed(action: Callable[[], FeatureEstimate], device: str, repeats: int = 1) -> tuple[FeatureEstimate, float]:
    """The result and the median of the seconds, on a device that has finished its work."""
    results, seconds = [], []
    for _ in range(repeats):
        _wait(device)
        start = time.perf_counter()
        results.append(action())
        _wait(device)
        seconds.append(time.perf_counter() - start)
    return results[-1], sorted(seconds)[len(seconds) // 2]


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
