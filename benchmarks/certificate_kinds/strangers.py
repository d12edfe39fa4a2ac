"""Certificates on networks and batches unlike those of the other kinds: other layers and inputs, samples that depend on each other."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor, nn
from torch.nn.functional import interpolate

import dosimeter as dm
from certificate_kinds.kind import Kind, Row
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.registry import ATTACKS as REGISTERED

CERTIFIABLE = 1e-2  # relative error that a certified feature or map may have at most
FALSE_INPUT = 0.02  # relative error beyond which a claimed input is no sample
DARK = 0.05  # root mean square below which a sample's error is relative to this
ACTIVATIONS: tuple[Callable[[], nn.Module], ...] = (
    nn.ReLU,
    nn.ReLU,
    nn.ReLU6,
    partial(nn.LeakyReLU, 0.2),
    nn.PReLU,
    nn.ELU,
    nn.SELU,
    nn.Softplus,
    nn.Hardtanh,
    nn.Hardswish,
    nn.SiLU,
    nn.GELU,
    nn.Tanh,
    nn.Sigmoid,
    nn.Identity,
    partial(nn.Threshold, 0.3, 0.0),
    nn.Hardshrink,
    nn.Softsign,
)
SHAPES = ((6,), (13,), (40,), (1, 5, 5), (1, 8, 8), (3, 6, 6), (3, 8, 8))
CLASSES = (2, 2, 3, 4, 7, 10, 26, 100, 1000)
SIZES = (1, 2, 3, 4, 5, 6, 8, 11, 16, 24)
BODIES = ("perceptron", "perceptron", "convolutions", "residual", "gated", "attention", "linear")
BATCHES = (
    "uniform",
    "normal",
    "smooth",
    "binary",
    "sparse",
    "one-hot",
    "constant",
    "multiples",
    "means",
    "black",
    "copies",
    "relabelled",
    "near",
    "8-bit",
)
LOCAL_STEPS: tuple[dict[str, Any], ...] = (
    {"learning_rate": 0.1},
    {"learning_rate": 1e-4},
    {"learning_rate": 0.1, "steps": 2},
    {"learning_rate": 0.5, "steps": 4},
    {"learning_rate": 0.05, "epochs": 2, "mini_batch": 2},
)
CHANGED_INPUTS = (
    "negative",
    "standardised",
    "turned",
    "rolled",
    "squared",
    "less the batch's mean",
    "near the batch's mean",
    "cut to pixels",
    "cut at two",
    "dark ones turned",
    "two views",
    "two views in the loss",
)
RANDOM_INPUTS = ("turned at times", "mixed by chance")  # nobody can compute again what the client's layers received
CHANGED_LOGITS = (
    "ten times",
    "learned scale",
    "log-softmax",
    "softmax",
    "clamped",
    "normed",
    "learned shift",
    "half detached",
    "tanh",
    "centred",
)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of draw fixes; the rest is drawn."""

    batches: tuple[str, ...] = BATCHES
    bodies: tuple[str, ...] = BODIES
    sizes: tuple[int, ...] = SIZES
    heads: tuple[str, ...] = ("plain", "plain", "unbiased", "sure", "tiny", "zero", "low rank")
    protocols: tuple[tuple[tuple[str, Any], ...], ...] = ((),)
    frames: tuple[str, ...] = ("",)  # what the model does to its inputs and logits
    told: Callable[[dm.Exposure, Generator], dm.Exposure] | None = None  # what the server is told instead
    breaks: str = ""
    repeatable: bool = True  # the same inputs give the same features, so that features and maps can be held against the truth


@dataclass(frozen=True, kw_only=True)
class Draw:
    model: nn.Module
    inputs: Tensor
    targets: Tensor  # (B,)
    exposure: dm.Exposure


def kinds(data: Path | None) -> list[Kind]:
    rows = {
        **{f"labels/{method}": partial(labels, method) for method in ("subspace", "cv_matching", "head_slopes")},
        **{f"features/{method}": partial(features, method) for method in ("subspace", "head_slopes")},
        "claims/linear_recursion": partial(claims, "linear_recursion"),
        "claims/trap_weights": partial(claims, "trap_weights"),
        "claims/imprint": partial(claims, "imprint"),
        **({"claims/loki": partial(claims, "loki")} if "loki" in REGISTERED.names() else {}),
        "maps": maps,
        "membership": membership,
    }
    singles = {"labels/soft_scalar": partial(labels, "soft_scalar"), "features/scalar": partial(features, "scalar")}
    return [
        Kind(name=f"{surface}: strangers, {name}", draw=partial(judge, setting), breaks=setting.breaks)
        for surface, judge in (rows | singles).items()
        for name, setting in settings().items()
        if (surface not in singles or setting.sizes == (1,)) and (setting.repeatable or surface.startswith(("labels", "claims")))
    ]


def settings() -> dict[str, Setting]:
    def behind(name: str, **options: Any) -> tuple[tuple[str, Any], ...]:
        return (("defenses", (dm.defense(name, **options),)),)

    hidden = (("declare_batch_size", False),)
    defenses = (
        behind("clipping", max_norm=0.05),
        behind("clipping", max_norm=0.05, mode="layer"),
        behind("clipping", max_norm=1e-3, mode="value"),
        behind("quantisation", bits=16),
        behind("quantisation", bits=6),
        behind("pruning", ratio=0.3),
        behind("gaussian_noise", std=1e-6),
        behind("laplace_noise", scale=1e-4),
        behind("sign"),
    )
    steps = tuple((("training", dm.FedAvg(**options)),) for options in LOCAL_STEPS)
    several = tuple(size for size in SIZES if size > 1)
    return {
        "any": Setting(),
        "one sample": Setting(sizes=(1,)),
        "dependent samples": Setting(batches=("multiples", "means", "constant", "one-hot", "near"), sizes=several),
        "copies": Setting(batches=("copies", "relabelled"), sizes=several),
        "heads": Setting(heads=("tiny", "zero", "low rank", "sure", "equal rows")),
        "no size": Setting(protocols=(hidden,)),
        "behind defenses": Setting(protocols=defenses),
        "local steps": Setting(protocols=steps),
        "local steps, heads of signs": Setting(protocols=steps[2:], heads=("signs", "equal rows"), bodies=("perceptron",)),
        "changed inputs": Setting(frames=CHANGED_INPUTS),
        "inputs changed at random": Setting(frames=RANDOM_INPUTS, repeatable=False),
        "changed logits": Setting(frames=CHANGED_LOGITS),
        "inputs of norm one": Setting(frames=("norm one",), breaks="span of the batch"),
        "wrong size": Setting(told=_resized, breaks="batch size"),
        "undeclared steps": Setting(protocols=steps[2:], told=_as_gradient, breaks="one gradient"),
    }


def labels(method: str, setting: Setting, seed: int) -> list[Row]:
    """One row for all counts; where these are not proved, one for each sample of the counts that are."""
    draw = _draw(setting, seed, weighted=method == "head_slopes")
    if method == "cv_matching":
        draw = replace(draw, exposure=_with_auxiliary(draw, seed))
    found = dm.recover_labels(draw.exposure, method, seed=seed)
    wanted = torch.bincount(draw.targets, minlength=len(found.counts))
    right = torch.equal(found.counts.cpu(), wanted)
    rows = [Row(certified=found.certified, true=right, recovered=right, samples=len(draw.targets), premises=found.premises)]
    proved = found.details.get("proved", torch.zeros_like(wanted)).cpu() * (not found.certified)
    held = torch.minimum(proved, wanted)
    rows += [Row(certified=True, true=True, recovered=True, premises=found.premises)] * int(held.sum())
    return rows + [Row(certified=True, true=False, recovered=False, premises=found.premises)] * int((proved - held).sum())


def features(method: str, setting: Setting, seed: int) -> list[Row]:
    """One row a sample that is returned: true where one of the batch has its label and lies within its error bar, each once."""
    draw = _draw(setting, seed, weighted=method == "head_slopes")
    found = dm.recover_features(draw.exposure, method, seed=seed)
    truth = input_of(draw.model, find_head(draw.exposure).name, draw.inputs).detach().double()
    apart = _apart(found.features.double(), truth)
    if found.soft is None:
        agree = (found.labels[:, None] == draw.targets) | (found.labels < 0)[:, None]
    else:
        wanted = nn.functional.one_hot(draw.targets, found.soft.shape[1]).double()
        agree = torch.cdist(found.soft.double(), wanted, p=1) <= CERTIFIABLE
    error = _assigned(torch.where(agree, apart, torch.inf))
    assert found.error_bar is not None
    bars = found.error_bar.double().clamp_max(CERTIFIABLE)
    rows = [
        Row(certified=bool(sure), true=bool(off <= bar), recovered=bool(off <= CERTIFIABLE), premises=found.premises)
        for sure, off, bar in zip(found.certified, error, bars, strict=True)
    ]
    return rows + [Row(certified=False, true=False, recovered=False)] * max(len(draw.targets) - len(rows), 0)


def claims(attack: str, setting: Setting, seed: int) -> list[Row]:
    """One row a sample of the batch, and one for each claim that is none, or is one too many."""
    method = dm.attack(attack)
    tampered = attack != "linear_recursion"
    if tampered:
        shape = tuple(_draw(setting, seed).inputs.shape[1:])
        method = dm.attack(attack, input_shape=shape, **({"bins": 60} if attack in ("imprint", "loki") else {}))
    draw = _draw(setting, seed, method.tamper if tampered else None)  # pyright: ignore[reportAttributeAccessIssue]
    found = dm.reconstruct(draw.exposure, method, seed=seed)
    truth = draw.inputs.flatten(1).double()
    floor = DARK * math.sqrt(truth.shape[1])  # the error of a dark sample is relative to this
    error = _assigned(_apart(found.inputs.flatten(1).double(), truth, floor))
    sure = bool(found.premises)  # a guess has none, and says why
    size = draw.exposure.public.batch_size or len(error)
    false = max(int((error > FALSE_INPUT).sum()), len(error) - size)
    right = int((error <= FALSE_INPUT).sum())
    rows = [
        Row(certified=place < right and sure, true=True, recovered=place < right, premises=found.premises) for place in range(len(truth))
    ]
    return rows + [Row(certified=sure, true=False, recovered=False, premises=found.premises)] * false


def maps(setting: Setting, seed: int) -> list[Row]:
    """One row a sample that is returned: true where its map, and what the map leads to, are of one sample of the batch."""
    draw = _draw(setting, seed)
    found = dm.recover_maps(draw.exposure, seed=seed)
    truth = input_of(draw.model, found.layer, draw.inputs).double().flatten(1)
    apart = _apart(found.maps.double().flatten(1), truth)
    error, places = _assigned(apart), apart.argmin(1)
    right = (error <= found.error_bars.double().clamp_max(CERTIFIABLE)) & (found.batch_size <= len(truth))
    if found.samples is not None and found.samples.labels is not None:
        given = draw.targets[places]
        right &= found.samples.labels == given
    return [
        Row(certified=bool(sure), true=bool(holds), recovered=bool(off <= CERTIFIABLE), premises=found.premises)
        for sure, holds, off in zip(found.certified, right, error, strict=True)
    ]


def membership(setting: Setting, seed: int) -> list[Row]:
    """Candidates are the batch and as many others, some of them near a member, a mean of members, or a member under another label."""
    draw = _draw(setting, seed)
    rng = Generator().manual_seed(seed + 1)
    inputs, targets = draw.inputs, draw.targets
    classes = max(draw.exposure.public.classes, 2)
    others = torch.stack([inputs[0], inputs[0], inputs.mean(0), 1.1 * inputs[-1], inputs[-1].flip(0)])
    others[1] += 0.05 * torch.randn(others[1].shape, generator=rng)
    marks = torch.stack([(targets[0] + 1) % classes, targets[0], targets[0], targets[-1], targets[-1]])
    members = list(zip(inputs.double(), targets.tolist(), strict=True))
    candidates, ids = torch.cat([inputs, others.to(inputs)]), torch.cat([targets, marks])
    found = dm.test_membership(draw.exposure, dm.Batch(candidates, ids), seed=seed)
    inside = [
        any(label == other and bool(torch.equal(one.double(), sample)) for sample, other in members)
        for one, label in zip(candidates, ids.tolist(), strict=True)
    ]
    return [
        Row(certified=bool(member or out), true=bool(member) == within, recovered=bool(member) == within, premises=found.premises)
        for member, out, within in zip(found.members, found.excluded, inside, strict=True)
    ]


def _draw(setting: Setting, seed: int, tamper: Callable[[nn.Module], nn.Module] | None = None, *, weighted: bool = False) -> Draw:
    rng = Generator().manual_seed(seed)

    def pick(choices: tuple[Any, ...]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    shape, classes, size = pick(SHAPES), pick(CLASSES), pick(setting.sizes)
    inputs, targets = _batch(pick(setting.batches), size, shape, classes, rng)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _network(pick(setting.bodies), shape, classes, pick, pick(setting.heads))
        frame = pick(setting.frames)
        model = _Framed(model, frame, classes) if frame else model
    dtype = pick((torch.float32, torch.float32, torch.float32, torch.float64))
    model = model.to(dtype).eval()
    if tamper is not None:
        model = tamper(model)
    inputs = inputs.to(dtype)
    protocol = dict(pick(setting.protocols))
    loss = nn.CrossEntropyLoss(weight=0.2 + 3 * torch.rand(classes, generator=rng).to(dtype)) if weighted else None
    exposure = dm.observe(model, dm.Batch(inputs, targets), loss=loss, seed=seed, **protocol)
    exposure = exposure if setting.told is None else setting.told(exposure, rng)
    return Draw(model=model, inputs=inputs, targets=targets, exposure=exposure)


def _batch(kind: str, size: int, shape: tuple[int, ...], classes: int, rng: Generator) -> tuple[Tensor, Tensor]:
    inputs = torch.rand(size, *shape, generator=rng)
    targets = torch.randint(classes, (size,), generator=rng)
    count = inputs[0].numel()
    if kind == "normal":
        inputs = torch.randn(size, *shape, generator=rng)
    elif kind == "smooth" and len(shape) == 3:
        inputs = interpolate(torch.rand(size, shape[0], 3, 3, generator=rng), shape[1:], mode="bilinear")
    elif kind == "binary":
        inputs = (inputs > 0.6).float()
    elif kind == "8-bit":
        inputs = (inputs * 255).round() / 255
    elif kind == "sparse":
        inputs = inputs * (torch.rand(inputs.shape, generator=rng) < 0.15)
    elif kind == "one-hot":
        inputs = nn.functional.one_hot(torch.randint(count, (size,), generator=rng), count).float().reshape(size, *shape)
    elif kind == "constant":
        inputs = torch.rand(size, *[1] * len(shape), generator=rng).expand(size, *shape).clone()
    elif kind == "multiples":
        inputs = inputs[:1] * torch.linspace(0.3, 1, size).reshape(-1, *[1] * len(shape))
    elif kind == "means" and size > 2:
        inputs[-1] = inputs[:2].mean(0)
    elif kind == "black":
        inputs[0] = 0
    elif kind in ("copies", "relabelled", "near") and size > 1:
        inputs[1] = inputs[0]
        if kind == "near":
            inputs[1] += 10.0 ** -float(1 + 5 * torch.rand((), generator=rng)) * torch.randn(shape, generator=rng)
        if kind == "copies":
            targets[1] = targets[0]
    return inputs, targets


class _Gated(nn.Module):
    """A gated linear unit over flat inputs."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.values, self.gates = nn.Linear(inputs, width), nn.Linear(inputs, width)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        return self.values(flat) * self.gates(flat).sigmoid()


class _Residual(nn.Module):
    """A perceptron with a shortcut and layer norm."""

    def __init__(self, inputs: int, width: int, activation: nn.Module) -> None:
        super().__init__()
        self.first, self.second, self.norm, self.activation = (
            nn.Linear(inputs, width),
            nn.Linear(width, width),
            nn.LayerNorm(width),
            activation,
        )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.activation(self.first(inputs.flatten(1)))
        return self.activation(self.norm(hidden + self.second(hidden)))


class _Attention(nn.Module):
    """Self-attention over pieces of the input, pooled."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.inputs, self.embed = inputs, nn.Linear(1, width)
        self.attention, self.norm = nn.MultiheadAttention(width, 1, batch_first=True), nn.LayerNorm(width)

    def forward(self, inputs: Tensor) -> Tensor:
        pieces = self.embed(inputs.flatten(1)[:, : min(self.inputs, 16), None])
        return self.norm(pieces + self.attention(pieces, pieces, pieces, need_weights=False)[0]).mean(1)


class _Framed(nn.Module):
    """A network that changes its inputs before the first layer, or the logits behind the last one."""

    def __init__(self, net: nn.Module, frame: str, classes: int) -> None:
        super().__init__()
        self.net, self.frame = net, frame
        self.factor, self.shift = nn.Parameter(torch.tensor(3.0)), nn.Parameter(torch.randn(classes))
        self.norm = nn.BatchNorm1d(classes)
        self.norm.running_var.uniform_(0.5, 2)  # pyright: ignore[reportOptionalMemberAccess]

    def forward(self, inputs: Tensor) -> Tensor:
        return self._behind(self.net(self._before(inputs)), inputs)

    def _before(self, inputs: Tensor) -> Tensor:
        norms = inputs.flatten(1).norm(dim=1).clamp_min(1e-9).reshape(-1, *[1] * (inputs.ndim - 1))
        changed = {
            "negative": 1 - inputs,
            "standardised": (inputs - 0.3) / 0.2,
            "turned": inputs.flip(-1),
            "rolled": inputs.roll(1, -1),
            "squared": inputs.square(),
            "less the batch's mean": inputs - inputs.mean(0),
            "near the batch's mean": 0.9 * inputs + 0.1 * inputs.mean(0),
            "cut to pixels": inputs.clamp(0, 1),
            "cut at two": inputs.clamp(-2, 2),
            "dark ones turned": inputs.where(inputs.flatten(1).mean(1).reshape(norms.shape) > 0.3, inputs.flip(-1)),
            "norm one": inputs / norms,
        }
        if self.frame == "turned at times":
            return inputs.flip(-1) if float(torch.rand(())) < 0.3 else inputs
        if self.frame == "mixed by chance":
            return 0.8 * inputs + 0.2 * inputs[torch.randperm(len(inputs))]
        return changed.get(self.frame, inputs)

    def _behind(self, logits: Tensor, inputs: Tensor) -> Tensor:
        match self.frame:
            case "two views":
                return logits + self.net(inputs.flip(-1))
            case "two views in the loss":
                return ((logits.softmax(1) + self.net(inputs.flip(-1)).softmax(1)) / 2).log()
            case "ten times":
                return 10 * logits
            case "learned scale":
                return logits / self.factor
            case "log-softmax":
                return logits.log_softmax(1)
            case "softmax":
                return logits.softmax(1)
            case "clamped":
                return logits.clamp(-0.1, 0.1)
            case "normed":
                return self.norm(logits)
            case "learned shift":
                return logits + self.shift
            case "half detached":
                return logits + logits.detach()
            case "tanh":
                return 5 * logits.tanh()
            case "centred":
                return logits - logits.mean(1, keepdim=True)
        return logits


def _network(body: str, shape: tuple[int, ...], classes: int, pick: Callable[[tuple[Any, ...]], Any], head: str) -> nn.Module:
    inputs, width, activation = torch.Size(shape).numel(), pick((4, 16, 33, 64, 128, 300)), pick(ACTIVATIONS)
    bias, norm, depth, kernel, stride = (
        pick((True, True, False)),
        pick((True, False, False)),
        pick((1, 1, 2, 3)),
        pick((1, 3, 5)),
        pick((1, 2)),
    )
    if body == "linear":
        layers, width = [nn.Flatten()], inputs
    elif body == "convolutions" and len(shape) == 3:
        channels = max(width // 8, 2)
        layers = [nn.Conv2d(shape[0], channels, kernel, stride, kernel // 2, bias=bias), activation()]
        if depth > 1:
            layers += [nn.Conv2d(channels, channels, 3, padding=1, bias=bias), *([nn.GroupNorm(1, channels)] if norm else []), activation()]
        pool = pick((nn.Identity(), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)))
        layers += [pool, nn.Flatten()]
        width = int(nn.Sequential(*layers)(torch.zeros(1, *shape)).shape[1])
    elif body == "gated":
        layers = [_Gated(inputs, width)]
    elif body == "attention":
        layers, width = [_Attention(inputs, min(width, 33))], min(width, 33)
    elif body == "residual":
        layers = [_Residual(inputs, width, activation())]
    else:
        layers = [nn.Flatten()]
        for place in range(depth):
            layers += [nn.Linear(inputs if place == 0 else width, width, bias=bias), *([nn.LayerNorm(width)] if norm else []), activation()]
        layers += [nn.Dropout(0.3)]
    last = nn.Linear(width, classes, bias=head != "unbiased")
    with torch.no_grad():
        last.weight.mul_({"sure": 10.0, "tiny": 1e-4, "zero": 0.0}.get(head, 1.0))
        if head == "low rank":
            last.weight.copy_(torch.rand(classes, 1) @ torch.rand(1, width) / width)
        if head in ("tiny", "zero"):
            last.bias.zero_()
        if head == "signs":  # many a neuron is weighed alike by two classes
            last.weight.copy_(1e-3 * last.weight.sign())
        if head == "equal rows":  # the layers in front do not tell the two classes
            last.weight[1] = last.weight[0]
    return nn.Sequential(*layers, last)


def _with_auxiliary(draw: Draw, seed: int) -> dm.Exposure:
    classes = draw.exposure.public.classes
    ids = torch.arange(classes).repeat(2)[:100]
    inputs = torch.rand(len(ids), *draw.inputs.shape[1:], generator=Generator().manual_seed(seed + 77)).to(draw.inputs)
    return replace(draw.exposure, auxiliary=dm.Batch(inputs, ids))


def _resized(exposure: dm.Exposure, rng: Generator) -> dm.Exposure:
    size = exposure.public.batch_size or 1
    others = [other for other in range(1, 2 * size + 3) if other != size]
    chosen = others[int(torch.randint(len(others), (1,), generator=rng))]
    return replace(exposure, public=replace(exposure.public, batch_size=chosen))


def _as_gradient(exposure: dm.Exposure, rng: Generator) -> dm.Exposure:
    return replace(exposure, public=replace(exposure.public, training=dm.FedSGD()))


def _apart(found: Tensor, truth: Tensor, floor: float = 1e-12) -> Tensor:
    """Relative distances (n, B)."""
    return torch.cdist(found, truth, compute_mode="donot_use_mm_for_euclid_dist") / truth.norm(dim=1).clamp_min(floor)


def _assigned(apart: Tensor) -> Tensor:
    """The distance (n,) of each answer to its sample, each sample once; infinite beyond the batch."""
    rows, columns = linear_sum_assignment(apart.nan_to_num(1e9, 1e9).clamp_max(1e9).numpy())
    error = torch.full((len(apart),), torch.inf, dtype=torch.float64)
    error[torch.from_numpy(rows)] = apart[rows, columns]
    return error
