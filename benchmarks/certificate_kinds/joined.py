"""What certified maps lead to: the feature, the label and the maps of later layers of each sample; and claims about membership."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

import dosimeter as dm
from certificate_kinds.kind import Kind, Row
from certificate_kinds.maps import LARGEST_ERROR, NORMS, Case, fully_connected, residual, resnet, signed_in_train_mode, small
from dosimeter.engines.membership.estimate import MembershipEstimate  # noqa: F401  older trees have none, nor these kinds
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of

OTHERS = 3  # candidates outside the batch
ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.LeakyReLU)


def kinds(data: Path | None) -> list[Kind]:
    absent = "" if data is not None else "needs the shared data (--data)"
    listed = [
        *(
            _joined(f"{norm} norm, {mode}", partial(small, norm=norm, train=mode == "train"))
            for norm in NORMS
            for mode in ("eval", "train")
        ),
        _joined("float64", partial(small, dtype=torch.float64)),
        _joined("residual blocks, eval", residual),
        _joined("residual blocks, train", partial(residual, train=True)),
        _joined("signed activations, train", signed_in_train_mode),
        _joined("fully connected", fully_connected),
        _joined("an image twice", partial(small, change="twice")),
        _joined("an image nearly twice", partial(small, change="nearly twice"), breaks="smallest batch"),
        _joined("behind faint noise", partial(small, defenses=(dm.defense("gaussian_noise", std=1e-8),))),
        _joined("behind 20-bit quantisation", partial(small, defenses=(dm.defense("quantisation", bits=20),))),
        *(_joined(f"resnet18 {mode}", partial(resnet, data, train=mode == "train"), skipped=absent) for mode in ("eval", "train")),
    ]
    members = {
        "any network": Membership(),
        "alike samples": Membership(twist="alike"),
        "a near copy of a member": Membership(twist="near"),
        "a copy of a member under another label": Membership(twist="relabelled"),
        "a black image": Membership(twist="black"),
        "a duplicate": Membership(twist="duplicate"),
        "float64": Membership(dtype=torch.float64),
        "a confident head": Membership(gain=20.0),
        "one step of FedAvg": Membership(training=dm.FedAvg(learning_rate=0.1)),
        "declared one too many": Membership(by=1, breaks="batch size"),
        "declared one too few": Membership(by=-1, breaks="batch size"),
    }
    return [*listed, *(Kind(name=f"membership: {name}", draw=one, breaks=one.breaks) for name, one in members.items())]


def _joined(name: str, draw: Callable[[int], Case], breaks: str = "", skipped: str = "") -> Kind:
    return Kind(name=f"maps/samples: {name}", draw=partial(joined_samples, draw), breaks=breaks, skipped=skipped)


def joined_samples(draw: Callable[[int], Case], seed: int) -> list[Row]:
    """One row a sample; true where its map, its feature, its maps of later layers and its label are all of one sample of the batch."""
    model, inputs, exposure = draw(seed)
    found = dm.recover_maps(exposure, seed=seed)
    if found.samples is None:
        return [Row(certified=False, true=False, recovered=False)] * len(inputs)
    layers = {found.layer: found.maps, find_head(exposure).name: found.samples.features, **found.samples.maps}
    nearest = torch.cdist(found.maps.flatten(1), input_of(model, found.layer, inputs).double().flatten(1)).argmin(1)
    right = torch.ones(len(found.maps), dtype=torch.bool)
    for name, given in layers.items():
        true = input_of(model, name, inputs).double().flatten(1)[nearest]
        right &= (given.double().flatten(1) - true).norm(dim=1) <= LARGEST_ERROR * true.norm(dim=1)
    if found.samples.labels is not None:
        right &= found.samples.labels == _labels(model, inputs, exposure)[nearest]
    return [
        Row(certified=bool(sure), true=bool(holds), recovered=bool(holds), premises=found.premises)
        for sure, holds in zip(found.certified, right, strict=True)
    ]


def _labels(model: nn.Module, inputs: Tensor, exposure: dm.Exposure) -> Tensor:
    """The batch's labels: the head's gradient, given the true features, leaves no other (its slopes are softmax − label)."""
    head = find_head(exposure)
    features = input_of(model, head.name, inputs).detach().double()
    assert head.weight_gradient is not None
    return (torch.linalg.pinv(features.T) @ head.weight_gradient.double().T).argmin(1)


class Membership:
    """Of some candidates the first are the batch: one row a candidate that is claimed to be in it, or not to be in it."""

    def __init__(
        self, *, twist: str = "", dtype: torch.dtype = torch.float32, gain: float = 1.0, training: Any = None, by: int = 0, breaks: str = ""
    ) -> None:
        self.twist, self.dtype, self.gain, self.training, self.by, self.breaks = twist, dtype, gain, training, by, breaks

    def __call__(self, seed: int) -> list[Row]:
        rng = Generator().manual_seed(seed)

        def pick(choices: tuple[Any, ...]) -> Any:
            return choices[int(torch.randint(len(choices), (1,), generator=rng))]

        classes, width, size, activation = pick((2, 5, 10, 50)), pick((8, 16, 32, 64)), pick((1, 2, 4, 8, 12)), pick(ACTIVATIONS)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if pick((True, False)):
                body = (nn.Flatten(), nn.Linear(48, width), activation(), nn.Linear(width, width), activation())
                model = nn.Sequential(*body, nn.Linear(width, classes))
            else:
                model = nn.Sequential(nn.Conv2d(3, width, 3, 2, 1), activation(), nn.Flatten(), nn.Linear(4 * width, classes))
        with torch.no_grad():
            next(reversed(list(model.children()))).weight.mul_(self.gain)  # pyright: ignore[reportCallIssue]
        count = size + OTHERS
        inputs, targets = torch.rand(count, 3, 4, 4, generator=rng), torch.randint(classes, (count,), generator=rng)
        if self.twist == "alike":
            inputs = 0.98 * inputs[:1] + 0.02 * inputs
        elif self.twist == "black":
            inputs[0], inputs[size] = 0, 0.5
        elif self.twist == "duplicate" and size > 1:
            inputs[1], targets[1] = inputs[0], targets[0]
        elif self.twist in ("near", "relabelled"):
            inputs[size] = inputs[0] + (1e-2 * torch.randn(3, 4, 4, generator=rng) if self.twist == "near" else 0)
            targets[size] = targets[0] if self.twist == "near" else (targets[0] + 1) % classes
        model, inputs = model.to(self.dtype).eval(), inputs.to(self.dtype)
        exposure = dm.observe(model, dm.Batch(inputs[:size], targets[:size]), training=self.training or dm.FedSGD())
        exposure = replace(exposure, public=replace(exposure.public, batch_size=max(size + self.by, 1)))
        found = dm.test_membership(exposure, dm.Batch(inputs, targets))
        inside = [place < size for place in range(count)]
        return [
            Row(certified=bool(member or out), true=bool(member) == within, recovered=bool(member) == within, premises=found.premises)
            for member, out, within in zip(found.members, found.excluded, inside, strict=True)
        ]
