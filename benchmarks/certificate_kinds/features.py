"""Certified features: true where a sample of the batch has that label and lies within the error bar, each sample once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from head_cases import CERTIFIABLE, Case, build, errors, observed
from torch import Generator, nn
from torch.nn.functional import one_hot

import dosimeter as dm
from certificate_kinds.configurations import Configuration, configurations
from certificate_kinds.kind import Kind, Row
from dosimeter.defenses.outgoing import OutgoingDefense, live_entries
from dosimeter.interfaces import Public
from dosimeter.models.loading import load_model
from dosimeter.types import Distortion, Update


def kinds(data: Path | None) -> list[Kind]:
    """`subspace` on every configuration and on those of features alone, `scalar` on batches of one."""
    mine = [*configurations(data), *decoys(), *photographs_in_eval_mode(data), *more_defenses()]
    singles = [one for one in configurations(data) if "B=1" in one.name.split()] + single_samples()
    return [_kind("subspace", one) for one in mine] + [_kind("scalar", one) for one in singles]


def _kind(method: str, one: Configuration) -> Kind:
    draw = partial(certified_features, method, one)
    return Kind(name=f"features/{method}: {one.name}", draw=draw, breaks=one.breaks, skipped=one.skipped)


def certified_features(method: str, configuration: Configuration, seed: int) -> list[Row]:
    """One row a sample that is returned, and one for each sample of the batch beyond those."""
    case = configuration.draw(seed)
    found = dm.recover_features(case.exposure, method, seed=seed)
    error, bar = errors(found, case), torch.zeros(len(found.labels)) if found.error_bar is None else found.error_bar.cpu().double()
    premises = getattr(found, "premises", ())
    rows = [
        Row(certified=sure, true=near and inside, recovered=near, premises=premises)
        for sure, near, inside in zip(found.certified.tolist(), (error <= CERTIFIABLE).tolist(), (error <= bar).tolist())
    ]
    return rows + [Row(certified=False, true=False, recovered=False)] * max(len(case.labels) - len(rows), 0)


@dataclass(frozen=True, kw_only=True)
class Decoy(OutgoingDefense):
    """Averages another batch's gradient in, adds a `share` of the noise that it declares, and calls all of it independent noise."""

    other: Update
    std: float
    share: float

    def protect(self, update: Update, rng: Generator) -> Update:
        size = self.share * self.std
        return {
            name: (change + self.other[name]) / 2 + size * torch.randn(change.shape, generator=rng).to(change)
            for name, change in update.items()
        }

    def distorts(self) -> bool:
        return True

    def distortion(self, change: torch.Tensor, public: Public) -> Distortion:
        return live_entries(change, noise=self.std)


def decoys() -> list[Configuration]:
    return [
        Configuration(name="decoy that adds its noise", draw=partial(decoy, share=1.0), breaks="defense"),
        Configuration(name="decoy without its noise", draw=partial(decoy, share=0.0), breaks="defense"),
        Configuration(name="decoy without its noise, no size declared", draw=partial(decoy, share=0.0, declare=False), breaks="defense"),
        Configuration(name="decoy that adds its noise, no size declared", draw=partial(decoy, share=1.0, declare=False), breaks="defense"),
    ]


def decoy(seed: int, *, share: float, declare: bool = True) -> Case:
    """Half of the gradient comes from a batch that is not the client's."""
    rng = Generator().manual_seed(seed)
    plain = build(4, 100, 256, seed=seed)
    model, std = plain.exposure.model, 10.0 ** -float(4 + 3 * torch.rand((), generator=rng))
    inputs, labels = torch.rand(8, 256, generator=rng), torch.randint(0, 100, (8,), generator=rng)
    other = dm.observe(model, dm.Batch(inputs[4:], labels[4:])).update
    return observed(model, inputs[:4], labels[:4], defenses=(Decoy(other=other, std=std, share=share),), declare_batch_size=declare)


def photographs_in_eval_mode(data: Path | None) -> list[Configuration]:
    """Untrained residual nets on photographs: heads that are sure of themselves, on features that are nearly collinear."""
    absent = "" if data is not None else "needs the shared data (--data)"
    return [
        Configuration(name=f"resnet20 on photographs, {mode} B=13..16 C=50..100", draw=partial(photographed, data, mode), skipped=absent)
        for mode in ("eval", "train")
    ]


def photographed(data: Path, mode: str, seed: int) -> Case:
    import numpy as np

    rng = Generator().manual_seed(seed)
    classes, size = int(torch.randint(50, 101, (), generator=rng)), int(torch.randint(13, 17, (), generator=rng))
    images = np.load(data / "cifar100.npz")["train_images"]
    chosen = images[torch.randperm(len(images), generator=rng)[:size].numpy()]
    model = load_model("resnet20", {"classes": classes}, None, seed % 1000).train(mode == "train")
    inputs = torch.from_numpy(chosen).permute(0, 3, 1, 2).float() / 255
    return observed(model, inputs, torch.randint(0, classes, (size,), generator=rng))


def more_defenses() -> list[Configuration]:
    """Rounded updates, and defenses in a row, on heads that are more or less sure of themselves."""
    both = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1e-6))
    later = (dm.defense("gaussian_noise", std=1e-6), dm.defense("clipping", max_norm=0.05))
    spelt = {
        "clipped, then noise": both,
        "noise, then clipped": later,
        "quantised, then noise": (dm.defense("quantisation", bits=16), both[1]),
    }
    kinds = [Configuration(name=name, draw=partial(defended_by, defenses)) for name, defenses in spelt.items()]
    for dtype in (torch.bfloat16, torch.float16):
        name = str(dtype).removeprefix("torch.")
        kinds.append(Configuration(name=f"rounded to {name}", draw=partial(rounded, dtype)))
    return kinds


def defended_by(defenses: tuple[OutgoingDefense, ...], seed: int) -> Case:
    gain = (1.0, 4.0, 12.0)[seed % 3]
    return build(8, 100, 512, seed=seed, gain=gain, defenses=defenses)


def rounded(dtype: torch.dtype, seed: int) -> Case:
    """The update rounded to `dtype`; sent in it, or for every second seed as float32."""
    case = build(8, 1000 if seed % 3 == 0 else 100, 512, seed=seed)
    update = {name: change.to(dtype).to(torch.float32 if seed % 2 else dtype) for name, change in case.exposure.update.items()}
    return replace(case, exposure=replace(case.exposure, update=update))


def single_samples() -> list[Configuration]:
    return [
        Configuration(name="one sample", draw=single_sample),
        Configuration(name="one smoothed label", draw=partial(single_sample, smoothing=True)),
        Configuration(name="two samples declared as one", draw=two_as_one, breaks="batch size"),
    ]


def single_sample(seed: int, *, smoothing: bool = False) -> Case:
    """One sample in a random perceptron, with and without a bias, sure of itself or not."""
    rng = Generator().manual_seed(seed)
    classes, gain = (4, 10, 100, 1000)[seed % 4], (1.0, 3.0, 10.0)[seed // 4 % 3]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, classes, bias=seed % 2 == 0))
    with torch.no_grad():
        model[2].weight.mul_(gain)
    label = torch.randint(0, classes, (1,), generator=rng)
    strength = 0.3 * float(torch.rand((), generator=rng))
    soft = (1 - strength) * one_hot(label, classes) + strength / classes
    return observed(model, torch.rand(1, 64, generator=rng), soft if smoothing else label)


def two_as_one(seed: int) -> Case:
    case = build(2, 100, 128, seed=seed, train=False)
    return replace(case, exposure=replace(case.exposure, public=replace(case.exposure.public, batch_size=1)))
