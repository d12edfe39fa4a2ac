"""Certificates under losses other than plain cross-entropy: labels, features and targets that the slopes at the head prove."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor, nn

import dosimeter as dm
from certificate_kinds.kind import Kind, Row
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.targets.head_slopes import HeadSlopes as TargetSlopes  # noqa: F401  older trees have no targets, nor these kinds

PIXELS = (3, 8, 8)
CERTIFIABLE = 1e-2  # the largest error that a certificate may stand for, relative
ROUNDINGS = 64  # units of single precision by which a target may miss beside its error bar
RECTIFIERS = (nn.ReLU, nn.ReLU, nn.ReLU6)
OTHERS = (nn.LeakyReLU, nn.GELU, nn.Sigmoid, nn.Tanh)
LOSSES = ("several labels", "one logit", "weighted classes", "weighted labels", "regression", "own loss")
TOLD = {"labels": LOSSES[:4], "features": LOSSES, "targets": ("regression",)}  # the losses of which the head tells each


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of draw fixes; the rest is drawn."""

    losses: tuple[str, ...] = LOSSES
    activations: tuple[type[nn.Module], ...] = RECTIFIERS
    sizes: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12)
    classes: tuple[int, ...] = (2, 3, 5, 10, 20, 50)
    twist: str = ""  # black, duplicate, alike, confident, zero biases, no biases, closed or summed
    dtypes: tuple[torch.dtype, ...] = (torch.float32,)
    protocol: tuple[tuple[str, Any], ...] = ()  # options of `observe`
    received: Callable[[Exposure], Exposure] | None = None  # what the server is told wrongly
    breaks: str = ""


@dataclass(frozen=True, kw_only=True)
class Draw:
    """An exposure and the truth behind it."""

    loss: str
    exposure: Exposure
    features: Tensor  # (B, H) float64
    targets: Tensor  # (B,) class ids, (B, C) zeros and ones, or (B, K) numbers


def kinds(data: Path | None) -> list[Kind]:
    methods = {"labels": certified_labels, "features": certified_features, "targets": certified_targets}
    return [
        Kind(name=f"{surface}/head_slopes: {name}", draw=partial(rows, replace(setting, losses=losses)), breaks=setting.breaks)
        for surface, rows in methods.items()
        for name, setting in settings().items()
        if (losses := tuple(loss for loss in setting.losses if loss in TOLD[surface]))
    ]


def settings() -> dict[str, Setting]:
    def behind(name: str, **options: Any) -> Setting:
        return Setting(protocol=(("defenses", (dm.defense(name, **options),)),))

    alone = {loss: Setting(losses=(loss,)) for loss in LOSSES}
    mixed = {
        "one sample": Setting(sizes=(1,), activations=RECTIFIERS + OTHERS),
        "several labels, no rectifier": Setting(losses=("several labels",), activations=OTHERS, classes=(5, 10, 20, 50)),
        "no rectifier": Setting(activations=OTHERS),
        "float64": Setting(dtypes=(torch.float64,)),
        "bfloat16": Setting(dtypes=(torch.bfloat16,)),
        "a black image": Setting(twist="black", sizes=(2, 3, 4, 6, 8)),
        "a duplicate": Setting(twist="duplicate", sizes=(2, 3, 4, 6, 8)),
        "a duplicate under other labels": Setting(twist="relabelled", sizes=(2, 3, 4, 6, 8)),
        "alike samples": Setting(twist="alike", sizes=(2, 3, 4, 6)),
        "nearly a duplicate": Setting(twist="near", sizes=(2, 3, 4, 6)),
        "a confident head": Setting(twist="confident"),
        "biases of zero": Setting(twist="zero biases", activations=RECTIFIERS + OTHERS),
        "no biases": Setting(twist="no biases", losses=("several labels", "one logit"), activations=RECTIFIERS + OTHERS),
        "a function behind the head": Setting(twist="closed", losses=("several labels", "regression"), activations=RECTIFIERS + OTHERS),
        "a sum over the batch": Setting(twist="summed", losses=("several labels", "weighted labels", "regression")),
        "many samples": Setting(sizes=(16, 24, 32)),
        "no size declared": Setting(protocol=(("declare_batch_size", False),)),
        "a duplicate, no size declared": Setting(twist="duplicate", sizes=(3, 4, 6), protocol=(("declare_batch_size", False),)),
        "behind faint noise": behind("gaussian_noise", std=1e-7),
        "behind noise": behind("gaussian_noise", std=1e-4),
        "behind 16-bit quantisation": behind("quantisation", bits=16),
        "behind 8-bit quantisation": behind("quantisation", bits=8),
        "behind pruning": behind("pruning", ratio=0.1),
        "behind clipping": behind("clipping", max_norm=0.05),
        "behind clipping of each layer": behind("clipping", max_norm=0.05, mode="layer"),
        "one step of FedAvg": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.1)),)),
        "local steps": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.1, steps=3)),)),
        "declared one too many": Setting(received=partial(_resized, 1), breaks="batch size"),
        "declared one too few": Setting(received=partial(_resized, -1), sizes=(2, 3, 4, 6, 8), breaks="batch size"),
        "local steps, undeclared": Setting(
            protocol=(("training", dm.FedAvg(learning_rate=0.1, steps=3)),), received=_as_gradient, breaks="one gradient"
        ),
        "clipping of each layer, undeclared": Setting(
            protocol=(("defenses", (dm.defense("clipping", max_norm=0.05, mode="layer"),)),), received=_undefended, breaks="defense"
        ),
        "a sum over classes, declared as a mean": Setting(losses=("several labels",), received=_as_mean, breaks="declared loss"),
    }
    return alone | mixed


def certified_labels(setting: Setting, seed: int) -> list[Row]:
    """One row for all counts and label vectors; where these are not proved, one for each class of which samples are."""
    draw = _draw(setting, seed)
    found = dm.recover_labels(draw.exposure, "head_slopes", seed=seed)
    wanted = _one_hot(draw)
    right = torch.equal(found.counts.cpu(), wanted.sum(0)) and (found.soft is None or _same_rows(found.soft.cpu(), wanted))
    rows = [Row(certified=found.certified, true=right, recovered=right, samples=len(wanted), premises=found.premises)]
    proved = found.details["proved"].cpu() * (not found.certified)
    return rows + [
        Row(certified=True, true=held, recovered=held, premises=found.premises) for held in (proved <= wanted.sum(0))[proved > 0].tolist()
    ]


def certified_features(setting: Setting, seed: int) -> list[Row]:
    """One row a sample that is returned; true where a sample of the batch lies within the error bar and has these labels, each once."""
    draw = _draw(setting, seed)
    found = dm.recover_features(draw.exposure, "head_slopes", seed=seed)
    apart = torch.cdist(found.features.double(), draw.features, compute_mode="donot_use_mm_for_euclid_dist")
    apart = apart / draw.features.norm(dim=1).clamp_min(torch.finfo(torch.float64).tiny)
    if found.soft is not None or bool((found.labels >= 0).any()):
        wanted, single = _one_hot(draw), found.soft is None or found.soft.shape[1] == 1
        given = nn.functional.one_hot(found.labels.clamp_min(0), wanted.shape[1]) if single or found.soft is None else found.soft.long()
        agree = (given[:, None] == wanted).all(2) | ((found.labels < 0) & single)[:, None]
        apart = torch.where(agree, apart, torch.inf)
    assert found.error_bar is not None
    error = _assigned(apart)
    true = error <= found.error_bar.double().clamp_max(CERTIFIABLE)
    rows = [
        Row(certified=bool(sure), true=bool(holds), recovered=bool(off <= CERTIFIABLE), premises=found.premises)
        for sure, holds, off in zip(found.certified, true, error, strict=True)
    ]
    return rows + [Row(certified=False, true=False, recovered=False)] * max(len(draw.features) - len(rows), 0)


def certified_targets(setting: Setting, seed: int) -> list[Row]:
    """One row a target that is returned; true where one of the batch lies within the error bar, each once."""
    draw = _draw(setting, seed)
    found = dm.recover_targets(draw.exposure, "head_slopes", seed=seed)
    wanted = draw.targets.double().flatten(1)
    apart = torch.cdist(found.targets.double().flatten(1), wanted, compute_mode="donot_use_mm_for_euclid_dist")
    error, size = _assigned(apart), float(wanted.norm(dim=1).max())
    rounding = ROUNDINGS * torch.finfo(torch.float32).eps * size
    return [
        Row(certified=bool(sure), true=bool(off <= bar + rounding), recovered=bool(off <= CERTIFIABLE * size), premises=found.premises)
        for sure, off, bar in zip(found.certified, error, found.error_bars, strict=True)
    ]


def _draw(setting: Setting, seed: int) -> Draw:
    rng = Generator().manual_seed(seed)

    def pick(choices: tuple[Any, ...]) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    loss, size, classes, width = pick(setting.losses), pick(setting.sizes), pick(setting.classes), pick((16, 64, 256))
    activation, convolution, dtype = pick(setting.activations), pick((False, False, True)), pick(setting.dtypes)
    classes = 1 if loss == "one logit" else classes
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stem = nn.Conv2d(3, width // 16, 3, 2, 1) if convolution else nn.Linear(192, width)
        body = (stem, activation(), nn.Flatten()) if convolution else (nn.Flatten(), stem, activation())
        head = nn.Linear(width, classes, bias=setting.twist != "no biases")
        if setting.twist == "zero biases":
            nn.init.zeros_(head.bias)
        closing = []
        if setting.twist == "closed":
            closing = [nn.Sigmoid() if loss == "several labels" else pick((nn.Tanh, nn.Sigmoid, nn.Softplus))()]
        model = nn.Sequential(*body, head, *closing).to(dtype).eval()
        if setting.twist == "confident":
            with torch.no_grad():
                model[-1].weight.mul_(8)  # pyright: ignore[reportCallIssue]
    inputs = torch.rand(size, *PIXELS, generator=rng)
    targets = _targets(loss, size, classes, rng)
    if setting.twist == "black":
        inputs[0] = 0
    elif setting.twist in ("duplicate", "relabelled", "near") and size > 1:
        inputs[1] = inputs[0]
        if setting.twist == "near":
            inputs[1] += 10.0 ** -pick((2, 3, 4, 5)) * torch.randn(PIXELS, generator=rng)
        if setting.twist != "relabelled":
            targets[1] = targets[0]
    elif setting.twist == "alike":
        inputs = 0.8 * inputs[:1] + 0.2 * inputs
    inputs = inputs.to(dtype)
    targets = targets.to(dtype) if targets.is_floating_point() else targets
    function = nn.BCELoss() if setting.twist == "closed" and loss == "several labels" else _loss(loss, classes, rng, dtype)
    if setting.twist == "summed":
        function.reduction = "sum"
    exposure = dm.observe(model, dm.Batch(inputs, targets), loss=function, **dict(setting.protocol))
    exposure = exposure if setting.received is None else setting.received(exposure)
    features = input_of(model, find_head(exposure).name, inputs).detach().double()
    return Draw(loss=loss, exposure=exposure, features=features, targets=targets)


def _targets(loss: str, size: int, classes: int, rng: Generator) -> Tensor:
    if loss in ("several labels", "weighted labels"):
        return (torch.rand(size, classes, generator=rng) < torch.rand((), generator=rng).clamp(0.1, 0.9)).float()
    if loss == "one logit":
        return torch.randint(2, (size,), generator=rng)
    if loss == "weighted classes":
        return torch.randint(classes, (size,), generator=rng)
    return 3 * torch.randn(size, classes, generator=rng)


def _loss(loss: str, classes: int, rng: Generator, dtype: torch.dtype) -> Any:
    weights = (0.2 + 3 * torch.rand(classes, generator=rng)).to(dtype)
    return {
        "several labels": nn.BCEWithLogitsLoss(),
        "one logit": dm.BinaryCrossEntropy(),
        "weighted classes": nn.CrossEntropyLoss(weight=weights),
        "weighted labels": nn.BCEWithLogitsLoss(pos_weight=weights),
        "regression": nn.MSELoss(),
        "own loss": nn.SmoothL1Loss(),
    }[loss]


def _one_hot(draw: Draw) -> Tensor:
    """The true label vectors (B, C), of two columns where the model has one logit."""
    classes = max(draw.exposure.public.classes, 2)
    return draw.targets.long() if draw.targets.ndim == 2 else nn.functional.one_hot(draw.targets.long(), classes)


def _same_rows(found: Tensor, wanted: Tensor) -> bool:
    return sorted(found.long().tolist()) == sorted(wanted.tolist())


def _assigned(apart: Tensor) -> Tensor:
    """The distance (n,) of each answer to its sample, each sample once; infinite beyond the batch."""
    rows, columns = linear_sum_assignment(apart.clamp_max(1e9).numpy())
    error = torch.full((len(apart),), torch.inf, dtype=torch.float64)
    error[torch.from_numpy(rows)] = apart[rows, columns]
    return error


def _resized(by: int, exposure: Exposure) -> Exposure:
    return replace(exposure, public=replace(exposure.public, batch_size=max((exposure.public.batch_size or 1) + by, 1)))


def _as_gradient(exposure: Exposure) -> Exposure:
    return replace(exposure, public=replace(exposure.public, training=dm.FedSGD()))


def _undefended(exposure: Exposure) -> Exposure:
    return replace(exposure, public=replace(exposure.public, defenses=()))


def _as_mean(exposure: Exposure) -> Exposure:
    """The client's gradient is C times that of the declared loss."""
    update = {name: change * exposure.public.classes for name, change in exposure.update.items()}
    return replace(exposure, update=update)
