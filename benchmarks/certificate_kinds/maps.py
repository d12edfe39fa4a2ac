"""Certified activation maps: true where a map is that of a sample of the batch, within its error bar and within 1e-2."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate

import dosimeter as dm
from certificate_kinds.kind import Kind, Row
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import input_of
from dosimeter.registry import MODELS

LARGEST_ERROR = 1e-2
NORMS = ("batch", "group", "none")
Case = tuple[nn.Module, Tensor, Exposure]  # the model, the inputs it trained on, and what it sent


def kinds(data: Path | None) -> list[Kind]:
    absent = "" if data is not None else "needs the shared data (--data)"
    listed = [
        *(_kind(f"{norm} norm, {mode}", partial(small, norm=norm, train=mode == "train")) for norm in NORMS for mode in ("eval", "train")),
        _kind("float64", partial(small, dtype=torch.float64)),
        _kind("kernels of 5 by 5", partial(small, kernel=5)),
        _kind("fewer inputs than positions", one_sided),
        _kind("dead channels", partial(one_sided, dead=True)),
        _kind("kernels of 4 by 4", partial(one_sided, even=True, kernel_size=4)),
        *(_kind(f"{mode} padding", partial(one_sided, even=True, padding_mode=mode)) for mode in ("reflect", "replicate")),
        _kind("no padding", partial(waved, padding=0)),
        _kind("no padding, train", partial(waved, padding=0, train=True)),
        _kind("wide padding", partial(waved, padding=2)),
        _kind("strides from edge to edge", partial(waved, padding=1, stride=2)),
        _kind("strides from edge to edge, signed", partial(waved, padding=1, stride=2, activation=nn.SiLU)),
        _kind("groups, one sample", grouped),
        _kind("groups, several samples", partial(grouped, several=True)),
        _kind("residual blocks, eval", residual),
        _kind("residual blocks, train", partial(residual, train=True)),
        _kind("fully connected", fully_connected),
        _kind("signed activations", partial(small, activation=nn.SiLU)),
        _kind("signed activations, train", signed_in_train_mode),
        _kind("leaky activations", partial(small, activation=nn.LeakyReLU)),
        _kind("a named layer", small, named=True),
        _kind("a named layer, train", partial(small, norm="batch", train=True), named=True),
        _kind("a named layer, residual", residual, named=True),
        _kind("a named layer, rounded", partial(small, defenses=(dm.defense("quantisation", bits=20),)), named=True),
        _kind("a black image", partial(small, change="black")),
        _kind("an image twice", partial(small, change="twice")),
        _kind("an image nearly twice", partial(small, change="nearly twice"), breaks="smallest batch"),
        _kind("signed activations, an image twice", partial(small, activation=nn.SiLU, change="twice")),
        _kind("too many samples", partial(small, crowded=True)),
        _kind("declared one too many", partial(misdeclared, 1), breaks="batch size"),
        _kind("declared one too few", partial(misdeclared, -1), breaks="batch size"),
        _kind("two local steps", partial(small, training=dm.FedAvg(steps=2, learning_rate=0.01))),
        _kind("one local step", partial(small, training=dm.FedAvg(steps=1, learning_rate=0.01))),
        _kind("mixup", partial(small, defenses=(dm.defense("mixup"),)), breaks="trained on the batch"),
        *(_kind(f"rounded to {str(dtype).removeprefix('torch.')}", partial(rounded, dtype)) for dtype in (torch.bfloat16, torch.float16)),
        *(_kind(f"resnet18 {mode}", partial(resnet, data, train=mode == "train"), skipped=absent) for mode in ("eval", "train")),
        _kind("resnet18 eval, many samples", partial(resnet, data, train=False, samples=(24, 32)), skipped=absent),
    ]
    for name, options in spoilt():
        defense = dm.defense(name, **options)
        spelt = ", ".join([name, *(f"{key}={value}" for key, value in options.items())])
        listed.append(_kind(f"{spelt}, declared", partial(small, defenses=(defense,))))
        listed.append(_kind(f"{spelt}, undeclared", partial(undeclared, defense), breaks="no defense"))
    both = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1e-6))
    return [*listed, _kind("clipped, then noise", partial(small, defenses=both))]


def spoilt() -> list[tuple[str, dict[str, Any]]]:
    """The noises of the head's campaign."""
    settings: list[tuple[str, dict[str, Any]]] = [("gaussian_noise", {"std": 10.0**power}) for power in (-9, -8, -7, -6, -5, -4, -2)]
    settings += [("laplace_noise", {"scale": 10.0**power}) for power in (-8, -7, -6, -5, -4)]
    settings += [("pruning", {"ratio": ratio}) for ratio in (0.02, 0.1, 0.5, 0.9, 0.99)]
    settings += [("quantisation", {"bits": bits}) for bits in (28, 24, 20, 16, 12, 8)]
    settings += [("clipping", {"max_norm": norm, "mode": mode}) for mode, norm in (("norm", 0.05), ("layer", 0.05), ("value", 1e-3))]
    return settings


def _kind(name: str, draw: Callable[[int], Case], breaks: str = "", skipped: str = "", named: bool = False) -> Kind:
    return Kind(name=f"maps: {name}", draw=partial(certified_maps, draw, named=named), breaks=breaks, skipped=skipped)


def certified_maps(draw: Callable[[int], Case], seed: int, *, named: bool = False) -> list[Row]:
    """One row a sample. With `named` one of the model's convolutions is asked for, whether its own gradient shows its maps or not."""
    model, inputs, exposure = draw(seed)
    convolutions = [name for name, module in model.named_modules() if isinstance(module, nn.Conv2d)]
    found = dm.recover_maps(exposure, layer=convolutions[seed % len(convolutions)] if named else None, seed=seed)
    truth = input_of(model, found.layer, inputs).double().flatten(1)
    distance, nearest = torch.cdist(found.maps.flatten(1), truth, compute_mode="donot_use_mm_for_euclid_dist").min(1)
    error = distance / truth.norm(dim=1)[nearest]
    right = (error <= found.error_bars.clamp_max(LARGEST_ERROR)) & (found.batch_size <= len(inputs))
    return [
        Row(certified=bool(certified), true=bool(holds), recovered=bool(off <= LARGEST_ERROR), premises=found.premises)
        for certified, holds, off in zip(found.certified, right, error)
    ]


def small(
    seed: int,
    *,
    norm: str | None = None,
    train: bool | None = None,
    kernel: int = 3,
    activation: type[nn.Module] = nn.ReLU,
    dtype: torch.dtype = torch.float32,
    change: str = "",
    crowded: bool = False,
    **options: Any,
) -> Case:
    """Two strided convolutions, then two that keep the grid, with 40 to 120 channels on a grid of 2 by 2 to 3 by 4."""
    rng = torch.Generator().manual_seed(seed)
    norm = norm or NORMS[_draw(rng, 0, 3)]
    channels, height, width = 4 * _draw(rng, 10, 31), _draw(rng, 2, 4), _draw(rng, 2, 5)
    most = max(channels // (height * width), 1)
    samples = most + _draw(rng, 1, 4) if crowded else _draw(rng, 1, min(most, 12) + 1)
    colours = 1 if seed % 2 else 3

    def block(inputs: int, size: int, stride: int) -> list[nn.Module]:
        norms = {"batch": nn.BatchNorm2d(channels), "group": nn.GroupNorm(4, channels), "none": nn.Identity()}
        return [nn.Conv2d(inputs, channels, size, stride, size // 2, bias=norm == "none" or bool(seed % 3)), norms[norm], activation()]

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers = [*block(colours, 3, 2), *block(channels, 3, 2), *block(channels, kernel, 1), *block(channels, kernel, 1)]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)).to(dtype)
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d | nn.GroupNorm):
                nn.init.uniform_(module.weight, 0.5, 1.5)
                nn.init.normal_(module.bias, std=0.3)
    train = bool(seed % 2) if train is None else train
    inputs = pictures(samples, (colours, 4 * height, 4 * width), rng).to(dtype)
    if change == "nearly twice":
        options["label"] = _draw(rng, 0, 10)
    if change == "black":
        inputs[0] = 0
    elif change:
        inputs[0] = inputs[-1] + (10.0 ** -_draw(rng, 1, 7) * torch.randn(inputs[0].shape, generator=rng) if "nearly" in change else 0)
    return observed(model.train(train and samples > 1), inputs, rng, seed, **options)


def one_sided(seed: int, *, dead: bool = False, even: bool = False, **options: Any) -> Case:
    """A convolution whose outputs can hold the positions, while its inputs cannot: they are fewer, or many of them are dead.

    With `even` both sides can, and `options` change the convolution.
    """
    rng = torch.Generator().manual_seed(seed)
    outputs, height, width = 4 * _draw(rng, 15, 31), _draw(rng, 3, 5), _draw(rng, 3, 5)
    samples = max(outputs // ((height + even) * (width + even)) - _draw(rng, 0, 2), 1)
    inputs = outputs if dead or even else max(int(0.75 * samples * height * width), 24)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stem = nn.Conv2d(3, inputs, 3, 2, 1)
        if dead:
            nn.init.constant_(stem.bias[: inputs - int(0.75 * samples * height * width)], -10.0)  # pyright: ignore[reportOptionalSubscript]
        read = nn.Conv2d(inputs, outputs, **{"kernel_size": 3, "padding": 1} | options)
        tail = (nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 10))
        model = nn.Sequential(stem, nn.ReLU(), read, *tail).eval()
    return observed(model, pictures(samples, (3, 2 * height, 2 * width), rng), rng, seed)


def waved(seed: int, *, padding: int, stride: int = 1, train: bool = False, activation: type[nn.Module] = nn.ReLU, **options: Any) -> Case:
    """A convolution whose positions waves over the grid tell, with or without batch norm behind it."""
    rng = torch.Generator().manual_seed(seed)
    height, width = (2 * _draw(rng, 2, 4) + 1 if stride > 1 else _draw(rng, 3, 6) + 1 - padding for _ in range(2))
    outputs = 4 * _draw(rng, 16, 36)
    grid = [(side + 2 * padding - 3) // stride + 1 for side in (height, width)]
    positions = max(height * width, grid[0] * grid[1]) if stride == 1 else grid[0] * grid[1]
    samples = _draw(rng, 1, min(max(outputs // positions, 1), 10) + 1)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(outputs) if train or seed % 2 else nn.Identity()
        stem = (nn.Conv2d(3, outputs, 3, 2, 1), activation())
        read = (nn.Conv2d(outputs, outputs, 3, stride, padding, **options), norm, activation())
        model = nn.Sequential(*stem, *read, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(outputs, 10))
    inputs = pictures(samples, (3, 2 * height, 2 * width), rng)
    return observed(model.train(train and samples > 1), inputs, rng, seed)


def grouped(seed: int, *, several: bool = False) -> Case:
    """Two to four groups of 20 to 40 channels, with or without a norm, and every third seed with signed activations."""
    rng = torch.Generator().manual_seed(seed)
    groups, width = _draw(rng, 2, 5), 4 * _draw(rng, 5, 11)
    height, channels = _draw(rng, 2, 5), groups * width
    activation = nn.ReLU if seed % 3 else nn.SiLU
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norm = nn.BatchNorm2d(channels) if seed % 2 else nn.Identity()
        read = (nn.Conv2d(channels, channels, 3, padding=1, groups=groups), norm, activation())
        tail = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10))
        model = nn.Sequential(nn.Conv2d(3, channels, 3, 2, 1), activation(), *read, *tail).eval()
    samples = _draw(rng, 2, 4) if several else 1
    return observed(model, pictures(samples, (3, 2 * height, 2 * height), rng), rng, seed)


def residual(seed: int, *, train: bool = False) -> Case:
    """Blocks with a shortcut, written otherwise than ours: functional ReLUs, one channel, 28 pixels."""
    rng = torch.Generator().manual_seed(seed)
    channels = 16 * _draw(rng, 4, 11)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = ResidualNet(channels)
    samples = _draw(rng, 1, min(channels // 16, 8) + 1)
    return observed(model.train(train and samples > 1), pictures(samples, (1, 28, 28), rng), rng, seed)


class ResidualNet(nn.Module):
    """A stem of stride 7, and two residual blocks on a grid of 4 by 4."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, channels, 7, 7)
        self.blocks = nn.ModuleList(
            nn.ModuleList(part for _ in range(2) for part in (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)))
            for _ in range(2)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = torch.relu(self.stem(inputs))
        for first, first_norm, second, second_norm in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            maps = torch.relu(maps + second_norm(second(torch.relu(first_norm(first(maps))))))
        return self.head(maps.mean((2, 3)))


def signed_in_train_mode(seed: int) -> Case:
    """SiLU or GELU behind batch norm in train mode, 64 to 160 channels on a grid of 4 by 4."""
    rng = torch.Generator().manual_seed(seed)
    channels, activation = 16 * _draw(rng, 4, 11), (nn.SiLU, nn.GELU)[seed % 2]()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stem = (nn.Conv2d(1, channels, 7, 7), nn.BatchNorm2d(channels), activation)
        read = (nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), activation)
        model = nn.Sequential(*stem, *read, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 20)).train()
    samples = _draw(rng, 2, min(channels // 16, 8) + 1)
    return observed(model, pictures(samples, (1, 28, 28), rng), rng, seed)


def fully_connected(seed: int) -> Case:
    rng = torch.Generator().manual_seed(seed)
    width, samples = 64 * _draw(rng, 1, 9), _draw(rng, 1, 25)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        hidden = (nn.Linear(192, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        model = nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, 10)).eval()
    return observed(model, pictures(samples, (3, 8, 8), rng), rng, seed)


def resnet(data: Path | None, seed: int, *, train: bool, samples: tuple[int, int] = (1, 17)) -> Case:
    """The registry's ResNet-18 on photographs of 32 pixels."""
    assert data is not None
    rng = torch.Generator().manual_seed(seed)
    images = np.load(data / "cifar100.npz")["test_images"]
    chosen = torch.randperm(len(images), generator=rng)[: _draw(rng, *samples)]
    inputs = torch.from_numpy(images[chosen.numpy()]).permute(0, 3, 1, 2).float() / 255
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS.build("resnet18", classes=100, size=32)
    return observed(model.train(train), inputs, rng, seed)


def undeclared(defense: Any, seed: int) -> Case:
    model, inputs, exposure = small(seed, defenses=(defense,))
    return model, inputs, replace(exposure, public=replace(exposure.public, defenses=()))


def rounded(dtype: torch.dtype, seed: int) -> Case:
    """The update rounded to `dtype`; sent in it, or for every second seed as float32."""
    model, inputs, exposure = small(seed)
    update = {name: change.to(dtype) for name, change in exposure.update.items()}
    return model, inputs, replace(exposure, update={name: change.float() for name, change in update.items()} if seed % 2 else update)


def misdeclared(by: int, seed: int) -> Case:
    model, inputs, exposure = small(seed)
    size = max(len(inputs) + by, 1)
    return model, inputs, replace(exposure, public=replace(exposure.public, batch_size=size))


def observed(model: nn.Module, inputs: Tensor, rng: Generator, seed: int, label: int | None = None, **options: Any) -> Case:
    """The size is declared for two seeds of three. With `label`, the first and the last sample share it."""
    heads = [module for module in model.modules() if isinstance(module, nn.Linear)]
    labels = torch.randint(0, heads[-1].out_features, (len(inputs),), generator=rng)
    if label is not None:
        labels[0] = labels[-1] = label
    return model, inputs, dm.observe(model, dm.Batch(inputs, labels), declare_batch_size=bool(seed % 3), seed=seed, **options)


def pictures(samples: int, shape: tuple[int, int, int], rng: Generator) -> Tensor:
    """Random images with large and small structures."""
    coarse = interpolate(torch.rand(samples, shape[0], 3, 3, generator=rng), shape[1:], mode="bilinear")
    return (coarse + 0.3 * torch.rand(samples, *shape, generator=rng)).clamp(0, 1)


def _draw(rng: Generator, low: int, high: int) -> int:
    return int(torch.randint(low, high, (), generator=rng))
