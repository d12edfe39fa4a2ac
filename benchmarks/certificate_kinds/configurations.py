"""Configurations for certificates of labels and features: networks, batches, defenses, and what the server is told wrongly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from head_cases import Case, build, observed, trained
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy

import dosimeter as dm
from dosimeter.interfaces import Client
from dosimeter.models.loading import load_model

PIXELS = (3, 8, 8)
ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.ReLU6, nn.Tanh, nn.Sigmoid, nn.GELU)
DEFENDED_SHAPES = ((8, 100, 512), (4, 20, 64), (12, 50, 256))  # batch size, classes, features
CLASSES = (2, 3, 5, 10, 20, 50, 100, 200, 1000)


@dataclass(frozen=True, kw_only=True)
class Configuration:
    """A case by seed, and what is wrong about it."""

    name: str
    draw: Callable[[int], Case]
    breaks: str = ""  # a word of the premise that does not hold
    skipped: str = ""


def configurations(data: Path | None) -> list[Configuration]:
    """All configurations. Those on shared data say why they are skipped where `data` is not given."""
    return [*plain(), *untraced(), *alike(), *confident(data), *defended(), *misdeclared()]


def plain() -> list[Configuration]:
    double = torch.float64
    shapes = ((1, 100, 512, True), (8, 100, 512, True), (32, 100, 512, True), (8, 100, 512, False), (32, 100, 512, False))
    shapes += ((4, 10, 64, True), (4, 10, 64, False), (3, 1000, 256, True), (48, 1000, 256, False))
    return [
        *(
            Configuration(name=f"float32 {'train' if train else 'eval'} B={b} C={c}", draw=_seeded(build, b, c, h, train=train and b > 1))
            for b, c, h, train in shapes
        ),
        Configuration(name="float64 eval B=16 C=100", draw=_seeded(build, 16, 100, 512, train=False, dtype=double)),
        Configuration(name="no size declared B=12 C=100", draw=_seeded(build, 12, 100, 512, declare_batch_size=False)),
        Configuration(name="random networks", draw=random_network),
        Configuration(name="random networks of two classes", draw=partial(random_network, classes=(2,))),
        Configuration(name="random networks of 1,000 classes", draw=partial(random_network, classes=(1000,))),
        Configuration(name="leaky ReLU", draw=partial(random_network, activations=(nn.LeakyReLU,))),
        Configuration(name="ReLU6", draw=partial(random_network, activations=(nn.ReLU6,))),
        Configuration(name="binary inputs", draw=partial(random_network, binary=True)),
        Configuration(name="no size declared, random networks", draw=partial(random_network, declare_batch_size=False)),
        Configuration(name="resnet20 eval B=13..16 C=50..100", draw=untrained_residual),
        Configuration(name="resnet20 train B=13..16 C=50..100", draw=partial(untrained_residual, train=True)),
    ]


def alone() -> list[Configuration]:
    """Batches of one."""
    one = {"sizes": (1,)}
    return [
        Configuration(name="one sample", draw=partial(random_network, **one)),
        Configuration(name="one sample, C=3..10", draw=partial(random_network, classes=(3, 5, 10), **one)),
        Configuration(name="one sample, 1,000 classes", draw=partial(random_network, classes=(1000,), **one)),
        Configuration(name="one sample, trained perceptron", draw=partial(trained_perceptron, sizes=(1,))),
        *(
            Configuration(name=f"one sample, {_spelt(name, options)}, declared", draw=partial(behind, name, options, shapes=((1, 20, 64),)))
            for name, options in (("gaussian_noise", {"std": 1e-5}), ("quantisation", {"bits": 8}), ("clipping", {"max_norm": 0.05}))
        ),
        Configuration(name="one sample, undeclared FedAvg", draw=partial(undeclared_steps, sizes=(1,)), breaks="one gradient"),
        Configuration(name="two samples declared as one", draw=two_as_one, breaks="batch size"),
    ]


def untraced() -> list[Configuration]:
    """Samples that leave no trace in the gradient, or none but in the bias."""
    return [
        Configuration(name="black image, no bias in the body", draw=black_image),
        Configuration(name="black image, no bias at all", draw=partial(black_image, head_bias=False)),
        Configuration(name="black image, no size declared", draw=partial(black_image, declare_batch_size=False)),
        Configuration(name="black image in random networks", draw=partial(random_network, black=True)),
        Configuration(name="black image, clipped", draw=partial(black_image, defenses=(dm.defense("clipping", max_norm=0.05),))),
    ]


def alike() -> list[Configuration]:
    return [
        Configuration(name="duplicates", draw=duplicates),
        Configuration(name="duplicates, no size declared", draw=partial(duplicates, first_once=True, declare_batch_size=False)),
        Configuration(name="near duplicates", draw=partial(duplicates, apart=True)),
        Configuration(
            name="near duplicates, no size declared", draw=partial(duplicates, apart=True, first_once=True, declare_batch_size=False)
        ),
        Configuration(name="duplicates under two labels", draw=partial(duplicates, other_labels=True)),
        Configuration(name="duplicates in random networks", draw=partial(random_network, copies=True)),
    ]


def confident(data: Path | None) -> list[Configuration]:
    """Models that know the labels of their batch, so that samples leave little."""
    absent = "" if data is not None else "needs the shared data (--data)"
    kinds = [Configuration(name=f"confident head x{gain:g} B=8 C=100", draw=_seeded(build, 8, 100, 512, gain=gain)) for gain in (4, 12, 20)]
    kinds += [
        Configuration(name="trained perceptron, own labels", draw=trained_perceptron),
        Configuration(name="trained perceptron, own labels, no size declared", draw=partial(trained_perceptron, declare_batch_size=False)),
    ]
    for mode in ("eval", "train"):
        for wrong, labels in ((0.0, "own labels"), (0.3, "some labels wrong")):
            draw = partial(trained_residual, data, train=mode == "train", wrong=wrong)
            kinds.append(Configuration(name=f"trained resnet20 {mode}, {labels}", draw=draw, skipped=absent))
    return kinds


def defended() -> list[Configuration]:
    settings: list[tuple[str, dict[str, Any]]] = [("gaussian_noise", {"std": 10.0**power}) for power in (-7, -5, -3)]
    settings += [("laplace_noise", {"scale": 1e-6}), ("pruning", {"ratio": 0.1}), ("pruning", {"ratio": 0.9})]
    settings += [("quantisation", {"bits": bits}) for bits in (16, 8, 6)]
    settings += [("clipping", {"max_norm": 0.05}), ("clipping", {"max_norm": 0.05, "mode": "layer"}), ("sign", {})]
    kinds = [Configuration(name=f"{_spelt(name, options)}, declared", draw=partial(behind, name, options)) for name, options in settings]
    return [
        *kinds,
        Configuration(name="mixup, declared", draw=mixed),
        Configuration(name="mixup, undeclared", draw=partial(mixed, declared=False)),
        Configuration(name="instahide, declared", draw=partial(mixed, defense="instahide")),
        Configuration(name="instahide, undeclared", draw=partial(mixed, defense="instahide", declared=False)),
    ]


def misdeclared() -> list[Configuration]:
    """What the server is told is wrong: a certificate must notice, or name the premise."""
    return [
        Configuration(name="declared one too few", draw=partial(wrong_size, -1), breaks="batch size"),
        Configuration(name="declared one too many", draw=partial(wrong_size, 1), breaks="batch size"),
        Configuration(name="declared half", draw=partial(wrong_size, "half"), breaks="batch size"),
        Configuration(name="declared double", draw=partial(wrong_size, "double"), breaks="batch size"),
        Configuration(name="any wrong size, random networks", draw=wrong_size_of_random_network, breaks="batch size"),
        Configuration(
            name="whole batch repeated, no size declared",
            draw=partial(duplicates, whole=True, declare_batch_size=False),
            breaks="smallest batch",
        ),
        Configuration(
            name="whole batch nearly repeated, no size declared",
            draw=partial(duplicates, whole=True, apart=True, declare_batch_size=False),
            breaks="smallest batch",
        ),
        Configuration(name="undeclared FedAvg", draw=undeclared_steps, breaks="one gradient"),
        Configuration(name="undeclared FedAvg B=1", draw=partial(undeclared_steps, sizes=(1,)), breaks="one gradient"),
        Configuration(name="undeclared mini-batches", draw=partial(undeclared_steps, mini_batch=True), breaks="one gradient"),
        Configuration(name="replaced batch", draw=replaced_batch, breaks="batch of the audit"),
        *(
            Configuration(
                name=f"{_spelt(name, options)}, undeclared", draw=partial(behind, name, options, declared=False), breaks="defense"
            )
            for name, options in (("gaussian_noise", {"std": 1e-5}), ("quantisation", {"bits": 8}), ("clipping", {"max_norm": 0.05}))
        ),
    ]


def random_network(
    seed: int,
    *,
    classes: Sequence[int] = CLASSES,
    activations: Sequence[type[nn.Module]] = ACTIVATIONS,
    sizes: Sequence[int] = tuple(range(1, 17)),
    binary: bool = False,
    black: bool = False,
    copies: bool = False,
    **options: Any,
) -> Case:
    """Any network on small images: perceptron or convolution, with and without biases and batch norm, train or eval, float32 or float64."""
    rng = Generator().manual_seed(seed)
    pick = partial(_pick, rng)
    size, count, width = pick(sizes), pick(classes), pick((16, 32, 64, 128, 256))
    size = max(size, 2) if black or copies else size
    activation, bias, head_bias, norm = pick(activations), pick((True, False)), pick((True, True, False)), pick((True, False))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        if pick((True, False)):
            body: list[nn.Module] = [
                nn.Flatten(),
                nn.Linear(192, width, bias=bias),
                *([nn.BatchNorm1d(width)] if norm else []),
                activation(),
            ]
        else:
            channels = max(width // 16, 2)
            body = [
                nn.Conv2d(3, channels, 3, stride=2, padding=1, bias=bias),
                *([nn.BatchNorm2d(channels)] if norm else []),
                activation(),
                nn.Flatten(),
            ]
            width = channels * 16
        model = nn.Sequential(*body, nn.Linear(width, count, bias=head_bias))
    model = model.to(pick((torch.float32, torch.float32, torch.float64))).train(pick((True, False)) and size > 1)
    inputs = torch.rand(size, *PIXELS, generator=rng)
    inputs = inputs.round() if binary else inputs
    labels = torch.randint(0, count, (size,), generator=rng)
    if copies:
        inputs[-1], labels[-1] = inputs[0], labels[0]
    if black:
        inputs[0] = 0
    return observed(model, inputs.to(next(model.parameters()).dtype), labels, **options)


def untrained_residual(seed: int, *, train: bool = False) -> Case:
    """An untrained ResNet-20 on random images with random labels."""
    rng = Generator().manual_seed(seed)
    size, classes = _pick(rng, range(13, 17)), _pick(rng, range(50, 101))
    model = load_model("resnet20", {"classes": classes}, None, seed % 1000).train(train)
    smooth = torch.rand(size, 3, 4, 4, generator=rng)
    images = nn.functional.interpolate(smooth, size=32, mode="bilinear") * 0.8 + 0.2 * torch.rand(size, 3, 32, 32, generator=rng)
    return observed(model, images, torch.randint(0, classes, (size,), generator=rng))


def black_image(seed: int, *, head_bias: bool = True, **options: Any) -> Case:
    """A batch of which one to three images are black, in a perceptron whose hidden layer has no bias."""
    rng = Generator().manual_seed(seed)
    size, classes, black = _pick(rng, range(3, 13)), _pick(rng, (20, 50, 100, 200)), _pick(rng, (1, 1, 1, 2, 3))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64, bias=False), nn.ReLU(), nn.Linear(64, classes, bias=head_bias))
    inputs, labels = torch.rand(size, *PIXELS, generator=rng), torch.randint(0, classes, (size,), generator=rng)
    inputs[:black] = 0
    return observed(model, inputs, labels, **options)


def duplicates(
    seed: int, *, other_labels: bool = False, apart: bool = False, first_once: bool = False, whole: bool = False, **options: Any
) -> Case:
    """A batch in which some samples occur twice or three times, with the same label or another; `apart` by a small distance.

    `first_once`: the first sample has no copy, so that no smaller batch has the same update. `whole`: every sample occurs equally often.
    """
    rng = Generator().manual_seed(seed)
    distinct, classes = _pick(rng, range(2, 9)), _pick(rng, (20, 100))
    copies = torch.randint(int(first_once), distinct, (_pick(rng, range(1, 6)),), generator=rng)
    if whole:
        copies = torch.arange(distinct).repeat(_pick(rng, (1, 2)))
    source = torch.cat([torch.arange(distinct), copies])
    plain = build(1, classes, 512, seed=seed, train=False)
    inputs = torch.rand(distinct, 256, generator=rng)[source]
    labels = torch.randint(0, classes, (distinct,), generator=rng)[source]
    labels[distinct:] = (labels[distinct:] + 7 * other_labels) % classes
    distance = 10.0 ** -(1 + 6 * float(torch.rand((), generator=rng))) if apart else 0.0
    inputs[distinct:] += distance * torch.randn(len(source) - distinct, 256, generator=rng)
    return observed(plain.exposure.model, inputs.clamp(0, 1), labels, **options)


def trained_perceptron(seed: int, *, sizes: Sequence[int] = tuple(range(2, 17)), **options: Any) -> Case:
    """A perceptron trained on clusters until it is sure of most samples, and a batch of its training data with its own labels."""
    rng = Generator().manual_seed(seed)
    size, classes = _pick(rng, sizes), _pick(rng, (10, 20, 50))
    centres = torch.rand(classes, 192, generator=rng)
    targets = torch.arange(classes).repeat(10)
    images = (centres[targets] + 0.15 * torch.randn(len(targets), 192, generator=rng)).clamp(0, 1).view(-1, *PIXELS)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(192, 64), nn.ReLU(), nn.Linear(64, classes))
    optimiser = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(_pick(rng, (100, 300, 1000))):
        optimiser.zero_grad()
        cross_entropy(model(images), targets).backward()
        optimiser.step()
    chosen = torch.randperm(len(targets), generator=rng)[:size]
    return observed(model.eval(), images[chosen], targets[chosen], **options)


def trained_residual(data: Path, seed: int, *, train: bool, wrong: float) -> Case:
    size = _pick(Generator().manual_seed(seed), (1, 2, 3, 4, 8, 16, 32) if not train else (3, 4, 6))
    return trained(data, size, seed=seed, train=train, wrong=wrong)


def behind(
    name: str, options: dict[str, Any], seed: int, *, declared: bool = True, shapes: Sequence[tuple[int, int, int]] = DEFENDED_SHAPES
) -> Case:
    """A plain batch behind one defense, of which the server knows or not."""
    size, classes, features = _pick(Generator().manual_seed(seed), shapes)
    case = build(size, classes, features, seed=seed, train=size > 1, defenses=(dm.defense(name, **options),))
    return case if declared else _told(case, defenses=())


def mixed(seed: int, *, declared: bool = True, defense: str = "mixup") -> Case:
    """A batch that a defense blended; the truth is what the client trained on."""
    plain = build(8, 100, 512, seed=seed)
    rng = Generator().manual_seed(seed)
    batch = dm.Batch(torch.rand(8, 256, generator=rng), plain.labels)
    blending = dm.defense(defense)
    blend = blending(Client(model=plain.exposure.model, batch=batch, training=dm.FedSGD(), loss=dm.CrossEntropy()), rng).batch
    case = observed(plain.exposure.model, blend.inputs, blend.targets)
    return _told(case, defenses=(blending,)) if declared else case


def wrong_size(change: int | str, seed: int) -> Case:
    size = _pick(Generator().manual_seed(seed), (2, 4, 6, 8, 12))
    case = build(size, 100, 512, seed=seed)
    return _told(case, batch_size={"half": size // 2, "double": 2 * size}.get(change) or max(size + int(change), 1))


def wrong_size_of_random_network(seed: int) -> Case:
    case = random_network(seed)
    size = len(case.labels)
    others = [other for other in range(1, 2 * size + 3) if other != size]
    return _told(case, batch_size=_pick(Generator().manual_seed(seed + 1), others))


def two_as_one(seed: int) -> Case:
    """Two samples, as a batch of one; the truth is the first."""
    case = random_network(seed, sizes=(2,), classes=(5, 10, 50))
    return _told(replace(case, labels=case.labels[:1], features=case.features[:1]), batch_size=1)


def undeclared_steps(seed: int, *, sizes: Sequence[int] = (1, 2, 4, 8), mini_batch: bool = False) -> Case:
    """Several local steps that pass for one gradient."""
    rng = Generator().manual_seed(seed)
    size, steps, rate = _pick(rng, sizes), _pick(rng, (2, 3, 5, 10)), _pick(rng, (1e-4, 1e-3, 1e-2, 1e-1))
    training = dm.FedAvg(steps=steps, learning_rate=rate, mini_batch=max(size // 2, 1) if mini_batch else None)
    case = build(size, 100, 128, seed=seed, train=False, training=training)
    return _told(case, training=dm.FedSGD())


def replaced_batch(seed: int) -> Case:
    """The client trained on other samples than those of the audit, and nobody says so."""
    mine, other = build(8, 100, 512, seed=seed), build(8, 100, 512, seed=seed + 500_000)
    exposure = dm.observe(mine.exposure.model, dm.Batch(torch.rand(8, 256, generator=Generator().manual_seed(seed + 1)), other.labels))
    return replace(mine, exposure=exposure)


def _told(case: Case, **what: Any) -> Case:
    """The same case with other public knowledge."""
    return replace(case, exposure=replace(case.exposure, public=replace(case.exposure.public, **what)))


def _seeded(draw: Callable[..., Case], *arguments: Any, **options: Any) -> Callable[[int], Case]:
    return partial(_by_seed, draw, arguments, options)


def _by_seed(draw: Callable[..., Case], arguments: tuple[Any, ...], options: dict[str, Any], seed: int) -> Case:
    return draw(*arguments, seed=seed, **options)


def _pick(rng: Generator, choices: Sequence[Any]) -> Any:
    return choices[int(torch.randint(0, len(choices), (), generator=rng))]


def _spelt(name: str, options: dict[str, Any]) -> str:
    return " ".join([name, *(f"{value:g}" if isinstance(value, float) else str(value) for value in options.values())])


def true_counts(labels: Tensor, classes: int) -> Tensor:
    """Samples per class, by the largest entry of soft labels: (C,)."""
    return torch.bincount(labels if labels.ndim == 1 else labels.argmax(1), minlength=classes)
