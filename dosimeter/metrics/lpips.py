"""Learned perceptual image patch similarity."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d, relu

from dosimeter.interfaces import Metric
from dosimeter.metrics import check_paired
from dosimeter.registry import METRICS

WEIGHTS_VARIABLE = "DOSIMETER_LPIPS_WEIGHTS"
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of inputs in [-1, 1]
SMALLEST_SIDE = 31  # pixels: below, the second pooling has no input left
LAYERS = ((4, 2, False), (1, 2, True), (1, 1, True), (1, 1, False), (1, 1, False))  # stride, padding, pooled before: AlexNet
IN_TORCHVISION = (0, 3, 6, 8, 10)  # where those convolutions stand in torchvision's AlexNet
IMAGES_AT_ONCE = 64  # images at a time

Weights = dict[str, Tensor]  # conv0..4.weight and .bias, lin0..4.weight


@METRICS.register("lpips")
@dataclass(frozen=True, kw_only=True)
class PerceptualSimilarity(Metric):
    """Distance of two images in the features of AlexNet, weighted by what people see.

    Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", CVPR 2018: Eq. (1), version 0.1.
    The weights come from a file with conv0..4.weight, conv0..4.bias and lin0..4.weight. The option `weights` names the file, else
    the environment variable DOSIMETER_LPIPS_WEIGHTS. Without either, torchvision's AlexNet in PyTorch's download folder is
    joined with the linear layers that an installed torchmetrics carries. Nothing is downloaded: without a file the metric is
    unavailable. A gray image is repeated over the network's three channels.
    """

    surface: ClassVar = "inputs"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "LPIPS"

    weights: str | None = None

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        check_paired(self.name, recovered, truth, dimensions=4)
        problem = self.unavailable(tuple(truth.shape[1:]))
        if problem is not None:
            raise ValueError(f"lpips: {problem}")
        pieces = zip(recovered.float().split(IMAGES_AT_ONCE), truth.float().split(IMAGES_AT_ONCE))
        with torch.no_grad():
            return torch.cat([perceptual_distance(first, second, self.weights) for first, second in pieces])  # (B,)

    def unavailable(self, shape: tuple[int, ...] | None = None) -> str | None:
        try:
            _load(*_sources(self.weights))
        except (OSError, ValueError) as error:
            return str(error)
        if shape is not None and (len(shape) != 3 or shape[0] not in (1, 3) or min(shape[1:]) < SMALLEST_SIDE):
            return f"needs images of 1 or 3 channels and at least {SMALLEST_SIDE}×{SMALLEST_SIDE} pixels, got samples of shape {shape}"
        return None


def perceptual_distance(first: Tensor, second: Tensor, source: str | None = None) -> Tensor:
    """Σ over layers of the mean over positions of w · (ŷ₁ − ŷ₂)², ŷ with unit length over channels (Eq. 1), differentiable: (B,)."""
    weights = {name: weight.to(first.device) for name, weight in _load(*_sources(source)).items()}
    total = first.new_zeros(len(first))
    for layer, (one, two) in enumerate(zip(_activations(first, weights), _activations(second, weights))):
        difference = (_unit(one) - _unit(two)).square()  # (B, channels, height, width)
        total = total + conv2d(difference, weights[f"lin{layer}.weight"]).mean((1, 2, 3))
    return total


def perceptual_distances(first: Tensor, second: Tensor, source: str | None = None) -> Tensor:
    """Eq. (1) of every picture (n, C, H, W) with every other (N, C, H, W), each sent through the network once: (n, N)."""
    weights = {name: weight.to(first.device) for name, weight in _load(*_sources(source)).items()}
    total = first.new_zeros(len(first), len(second))
    with torch.no_grad():
        for layer, sides in enumerate(zip(_activations(first, weights), _activations(second, weights))):
            root = weights[f"lin{layer}.weight"].clamp_min(0).sqrt().view(1, -1, 1, 1)  # the published weights are not negative
            one, two = ((_unit(side) * root).flatten(1) for side in sides)
            positions = sides[0].shape[2] * sides[0].shape[3]
            total = total + torch.cdist(one, two, compute_mode="donot_use_mm_for_euclid_dist").square() / positions
    return total


def _activations(pixels: Tensor, weights: Weights) -> Iterator[Tensor]:
    shift, scale = (pixels.new_tensor(values)[:, None, None] for values in (SHIFT, SCALE))
    hidden = (2 * pixels.expand(-1, 3, -1, -1) - 1 - shift) / scale
    for layer, (stride, padding, pooled) in enumerate(LAYERS):
        hidden = max_pool2d(hidden, 3, 2) if pooled else hidden
        hidden = relu(conv2d(hidden, weights[f"conv{layer}.weight"], weights[f"conv{layer}.bias"], stride, padding))
        yield hidden


def _unit(activation: Tensor) -> Tensor:
    return activation / ((activation.square().sum(1, keepdim=True) + 1e-20).sqrt() + 1e-10)  # inside the root too: at 0 a root has no slope


def _sources(option: str | None) -> tuple[Path, ...]:
    """The file, or the two files, that the weights are read from."""
    named = option or os.environ.get(WEIGHTS_VARIABLE)
    if named:
        return (Path(named).expanduser(),)
    backbone = Path(torch.hub.get_dir()) / "checkpoints" / "alexnet-owt-7be5be79.pth"
    torchmetrics = importlib.util.find_spec("torchmetrics")
    if not backbone.is_file() or torchmetrics is None or torchmetrics.origin is None:
        raise ValueError(f"no weights here; let {WEIGHTS_VARIABLE} or the option `weights` name a file with LPIPS-AlexNet weights")
    return backbone, Path(torchmetrics.origin).parent / "functional" / "image" / "lpips_models" / "alex.pth"


@lru_cache(maxsize=2)
def _load(*sources: Path) -> Weights:
    """The weights by our names; errors are ValueError or OSError with the path."""
    found: Weights = {}
    for source in sources:
        if not source.is_file():
            raise ValueError(f"{source}: no such file of LPIPS weights")
        try:
            found |= torch.load(source, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(f"{source}: cannot be read as a file of tensors") from error
    for layer, position in enumerate(IN_TORCHVISION):
        names = {f"features.{position}.weight": f"conv{layer}.weight", f"features.{position}.bias": f"conv{layer}.bias"}
        names[f"lin{layer}.model.1.weight"] = f"lin{layer}.weight"
        found |= {ours: found[theirs] for theirs, ours in names.items() if theirs in found}
    wanted = [f"{kind}{layer}.{part}" for layer in range(5) for kind, part in (("conv", "weight"), ("conv", "bias"), ("lin", "weight"))]
    missing = [name for name in wanted if name not in found]
    if missing:
        raise ValueError(f"{sources[0]}: not the weights of LPIPS-AlexNet, {missing[0]} is missing")
    return {name: found[name].float() for name in wanted}
