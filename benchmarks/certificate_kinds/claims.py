"""Claimed inputs of the attacks that read samples off a first layer: true where they are samples of the batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import cross_entropy, interpolate

import dosimeter as dm
from certificate_kinds.kind import Kind, Row
from certificate_kinds.rivals import split_copies
from dosimeter.network.first_layer import find_first_layers
from dosimeter.registry import ATTACKS as REGISTERED

FALSE_INPUT = 0.02  # relative error beyond which a claimed input is no sample
SHOWN_INPUT = 1e-3  # relative error up to which a row or bin shows a sample, and a claim recovers one
DARK = 0.05  # root mean square below which a sample's error is relative to this
ATTACKS = ("linear_recursion", "trap_weights", "imprint", "loki")
OPTIONS: dict[str, dict[str, Any]] = {"imprint": {"bins": 60}, "loki": {"bins": 60, "clients": 3}}  # beside the inputs' shape
ACTIVATIONS = (nn.ReLU, nn.ReLU, nn.ReLU6, nn.Tanh, partial(nn.LeakyReLU, 0.01), partial(nn.LeakyReLU, 0.1))
SHAPES = ((1, 8, 8), (3, 8, 8))
TINY_HEADS = (1e-5, 1e-4, 1e-3)  # the model predicts nearly the same for all inputs, so that the gradients of several samples can cancel


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of draw fixes; the rest is drawn."""

    classes: tuple[int, ...] = (2, 3, 5, 10, 100)
    activations: tuple[Callable[[], nn.Module], ...] = ACTIVATIONS
    pictures: tuple[str, ...] = ("float", "float", "coarse", "8-bit", "binary")
    twist: str = ""  # black, duplicate, alike, faint or faint levels
    heads: tuple[float, ...] = (0.2, 1.0, 1.0, 5.0)  # factors of the last layer's weight
    unbiased: bool = False  # the last layer's bias is zero
    trained: bool = False  # on the batch itself
    convolution: bool = False
    protocol: tuple[tuple[str, Any], ...] = ()  # options of `observe`
    wrong_size: int = 0  # added to the declared size
    breaks: str = ""


def kinds(data: Path | None) -> list[Kind]:
    known = [attack for attack in ATTACKS if attack in REGISTERED.names()]  # older code, with which results are compared, lacks some
    several = {"three clients": {}, "three clients, two local steps": {"training": dm.FedAvg(learning_rate=0.1, steps=2)}}
    several["three clients, mini-batches"] = {"training": dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=2)}
    return [
        Kind(name=f"claims/{attack}: {name}", draw=partial(claims, attack, setting), breaks=setting.breaks)
        for attack in known
        for name, setting in settings().items()
        if attack != "linear_recursion" or not setting.convolution
    ] + [Kind(name=f"claims/loki: {name}", draw=partial(clients_apart, options)) for name, options in several.items() if "loki" in known]


def settings() -> dict[str, Setting]:
    def behind(name: str, *, twist: str = "", **options: Any) -> Setting:
        return Setting(protocol=(("defenses", (dm.defense(name, **options),)),), twist=twist)

    return {
        "two classes": Setting(classes=(2,)),
        "3 to 10 classes": Setting(classes=(3, 5, 10)),
        "50 to 1,000 classes": Setting(classes=(50, 200, 1000)),
        "leaky ReLU, two classes": Setting(classes=(2,), activations=(partial(nn.LeakyReLU, 0.01), partial(nn.LeakyReLU, 0.1))),
        "ReLU6": Setting(activations=(nn.ReLU6,)),
        "floats": Setting(pictures=("float",)),
        "8-bit pictures": Setting(pictures=("8-bit",)),
        "black and white": Setting(pictures=("binary",)),
        "a black image": Setting(twist="black"),
        "a duplicate": Setting(twist="duplicate"),
        "alike samples": Setting(twist="alike"),
        "labels that cancel": Setting(classes=(2, 2, 3), heads=TINY_HEADS, unbiased=True, pictures=("float",), twist="faint"),
        "8-bit pictures, labels that cancel": Setting(
            classes=(2, 2, 3), heads=TINY_HEADS, unbiased=True, pictures=("coarse", "float"), twist="faint levels"
        ),
        "alike samples, tiny head": Setting(classes=(2, 2, 3), heads=TINY_HEADS, unbiased=True, twist="alike"),
        "trained on the batch": Setting(trained=True),
        "before a convolution": Setting(convolution=True),
        "behind clipping": behind("clipping", max_norm=0.05),
        "behind clipping of each layer": behind("clipping", max_norm=0.05, mode="layer"),
        "behind 6-bit quantisation": behind("quantisation", bits=6),
        "behind 16-bit quantisation": behind("quantisation", bits=16),
        "behind pruning": behind("pruning", ratio=0.5),
        "behind faint noise": behind("gaussian_noise", std=1e-7),
        "behind secure aggregation": behind("secure_aggregation", clients=2),
        "no size declared": Setting(protocol=(("declare_batch_size", False),)),
        "one step of FedAvg": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.5)),)),
        "local steps": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.5, steps=2)),)),
        "three local steps": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.5, steps=3)),)),
        "local steps with momentum": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.1, steps=2, momentum=0.9)),)),
        "local mini-batches": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=2)),)),
        "one step of FedAvg at a small rate": Setting(protocol=(("training", dm.FedAvg(learning_rate=1e-3)),)),
        "behind stochastic 16-bit quantisation": behind("quantisation", bits=16, stochastic=True),
        "alike samples behind 16-bit quantisation": behind("quantisation", bits=16, twist="alike"),
        "a duplicate behind 16-bit quantisation": behind("quantisation", bits=16, twist="duplicate"),
        "alike samples behind pruning": behind("pruning", ratio=0.1, twist="alike"),
        "one sample too many declared": Setting(wrong_size=1, breaks="batch size"),
        "one sample too few declared": Setting(wrong_size=-1, breaks="batch size"),
    }


def claims(attack: str, setting: Setting, seed: int) -> list[Row]:
    """One row a sample, claimed or not, and one for each claim that is no sample, or only nearly one."""
    rng = torch.Generator().manual_seed(seed)
    batch, model = _draw(setting, rng, seed)
    shape = tuple(batch.inputs.shape[1:])
    options: dict[str, Any] = {} if attack == "linear_recursion" else {"input_shape": shape}
    options |= {"expected": len(batch.inputs)} if attack == "trap_weights" else OPTIONS.get(attack, {})
    method = dm.attack(attack, **options)
    if attack != "linear_recursion":
        model = method.tamper(model)  # pyright: ignore[reportAttributeAccessIssue]
    exposure = dm.observe(model, batch, **dict(setting.protocol))
    if setting.wrong_size:
        declared = max(len(batch.inputs) + setting.wrong_size, 2)
        exposure = replace(exposure, public=replace(exposure.public, batch_size=declared))
    found = dm.reconstruct(exposure, method)
    premises = getattr(found, "premises", ())  # reconstructions of older code have none
    truth = batch.inputs.flatten(1).double()
    apart = _relative(found.inputs.flatten(1).double(), truth)  # (claims, samples)
    shown = (_relative(_quotients(exposure, shape), truth) <= SHOWN_INPUT).any(0)
    claimed = (apart <= SHOWN_INPUT).any(0)
    provable = [not seen or not has_rival(setting, model, batch, sample) for sample, seen in enumerate(claimed | shown)]
    rows = [
        Row(certified=bool(sure), true=True, recovered=bool(sure or seen) and sound, premises=premises)
        for sure, seen, sound in zip(claimed, shown, provable, strict=True)
    ]
    nearest = apart.amin(1) if len(apart) else apart.new_zeros(0)
    false = int((nearest > FALSE_INPUT).sum())
    mixed = int(((nearest > SHOWN_INPUT) & (nearest <= FALSE_INPUT)).sum())  # nearly a sample, with a little of another one in it
    surplus = max(len(found.inputs) - (exposure.public.batch_size or len(found.inputs)) - false, 0)  # more claims than samples
    return [
        *rows,
        *(Row(certified=True, true=True, recovered=False, samples=0, premises=premises) for _ in range(mixed)),
        *(Row(certified=True, true=False, recovered=False, premises=premises) for _ in range(false + surplus)),
    ]


def clients_apart(protocol: dict[str, Any], seed: int) -> list[Row]:
    """`loki` on the mean of three clients: a claim is true where it is a sample of the very client that it is told of."""
    rng = torch.Generator().manual_seed(seed)
    first, model = _draw(Setting(), rng, seed)
    shape, classes = tuple(first.inputs.shape[1:]), model[-1].out_features  # pyright: ignore[reportIndexIssue]
    sizes = [int(torch.randint(1, 9, (), generator=rng)) for _ in range(2)]
    pictures = ("float", "coarse", "8-bit", "binary")
    others = [
        dm.Batch(
            _pictures(pictures[int(torch.randint(4, (), generator=rng))], size, shape, rng),
            torch.randint(classes, (size,), generator=rng),
        )
        for size in sizes
    ]
    batches = [first, *others]
    method: Any = dm.attack("loki", input_shape=shape, **OPTIONS["loki"])
    rows = []
    for found, batch in zip(method.of_clients(dm.observe(method.tamper(model), batches, **protocol)), batches, strict=True):
        apart = _relative(found.inputs.flatten(1).double(), batch.inputs.flatten(1).double())
        claimed = (apart <= SHOWN_INPUT).any(0)
        false = int((apart.amin(1) > FALSE_INPUT).sum()) if len(apart) else 0
        false += max(len(found.inputs) - len(batch.inputs) - false, 0)
        rows += [Row(certified=bool(sure), true=True, recovered=bool(sure), premises=found.premises) for sure in claimed]
        rows += [Row(certified=True, true=False, recovered=False, premises=found.premises)] * false
    return rows


def has_rival(setting: Setting, model: nn.Module, batch: dm.Batch, sample: int) -> bool:
    """Whether another batch with the same update lacks this sample, so that no proof can tell."""
    return setting.twist == "duplicate" and split_copies(model, batch, sample, SHOWN_INPUT) is not None


def _relative(found: Tensor, truth: Tensor) -> Tensor:
    sizes = truth.norm(dim=1).clamp_min(DARK * math.sqrt(truth.shape[1]))
    return torch.cdist(found, truth, compute_mode="donot_use_mm_for_euclid_dist") / sizes


def _quotients(exposure: dm.Exposure, shape: tuple[int, ...]) -> Tensor:
    """What single rows, and differences of neighbouring rows, show: (n, d). Only the campaign compares them with the truth."""
    columns_of: Any = getattr(exposure.model, "columns_of", None)  # loki's
    pairs = [("rows.weight", "rows.bias")] if "rows.weight" in exposure.update else find_first_layers(exposure.model, shape)
    if columns_of is not None:
        copies, marks = columns_of(exposure.update["rows.weight"].double(), 0)
        weight, bias = copies / exposure.model.scale, marks  # pyright: ignore[reportOperatorIssue]
    else:
        weight = torch.cat([exposure.update[name].flatten(1) for name, _ in pairs]).double()
        bias = torch.cat([exposure.update[name] for _, name in pairs]).double()
    weight, bias = torch.cat([weight, -weight.diff(dim=0)]), torch.cat([bias, -bias.diff()])
    seen = bias != 0
    return weight[seen] / bias[seen, None]


def _draw(setting: Setting, rng: Generator, seed: int) -> tuple[dm.Batch, nn.Module]:
    def pick(choices: tuple[Any, ...]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    classes, activation, count, shape = pick(setting.classes), pick(setting.activations), pick((2, 3, 4, 8, 16)), pick(SHAPES)
    inputs = _pictures(pick(setting.pictures), count, shape, rng)
    targets = torch.randint(classes, (count,), generator=rng)
    if setting.twist == "black":
        inputs[0] = 0
    elif setting.twist == "duplicate":
        inputs[1] = inputs[0]
        targets[1] = pick((targets[0], targets[1]))
    elif setting.twist == "alike":
        inputs = 0.8 * inputs[:1] + 0.2 * inputs
    elif setting.twist == "faint":  # so that sums and differences of samples stay within the range of pixels
        inputs = 0.4 + 0.2 * inputs
    elif setting.twist == "faint levels":
        inputs = (255 * (0.4 + 0.2 * inputs)).round() / 255
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _network(setting.convolution, shape, pick((30, 100, 300)), pick((1, 1, 2)), activation, classes)
        with torch.no_grad():
            model[-1].weight.mul_(pick(setting.heads))
            model[-1].bias.mul_(not setting.unbiased)
        if setting.trained:
            _train(model, inputs, targets)
    return dm.Batch(inputs, targets), model.eval()


def _pictures(kind: str, count: int, shape: tuple[int, ...], rng: Generator) -> Tensor:
    if kind in ("coarse", "8-bit"):
        coarse = interpolate(torch.rand(count, shape[0], 4, 4, generator=rng), shape[1:], mode="bilinear")
        return coarse if kind == "coarse" else (coarse * 255).round() / 255
    pixels = torch.rand(count, *shape, generator=rng)
    return (pixels > 0.5).float() if kind == "binary" else pixels


def _network(convolution: bool, shape: tuple[int, ...], width: int, depth: int, activation: Callable[[], nn.Module], classes: int) -> Any:
    if convolution:
        return nn.Sequential(nn.Conv2d(shape[0], 6, 3, padding=1), activation(), nn.Flatten(), nn.Linear(384, classes))
    sizes = [math.prod(shape), width, *[40] * (depth - 1), classes]
    layers = [layer for inner, outer in pairwise(sizes) for layer in (nn.Linear(inner, outer), activation())]
    return nn.Sequential(nn.Flatten(), *layers[:-1])


def _train(model: nn.Module, inputs: Tensor, targets: Tensor) -> None:
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(40):
        optimiser.zero_grad()
        cross_entropy(model(inputs), targets).backward()
        optimiser.step()
