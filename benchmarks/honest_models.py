"""Honest models of every kind that `benchmarks/inspect_thresholds.py` tries the checks on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import interpolate
from unseen_architectures import INITIALISATIONS, UNSEEN, initialise

from dosimeter.data.load import load_images
from dosimeter.models.loading import load_model
from dosimeter.types import Batch

REGISTERED = {
    "fcn3": ({"hidden": (64, 48)}, {"hidden": (200, 100), "activation": "tanh"}),
    "mlp6": ({"hidden": (96, 64, 64, 48, 32, 24)},),
    "fcn4": ({"hidden": (128, 64, 32)}, {"hidden": (128, 64, 32), "bias": False}),
    "lenet5": ({}, {"activation": "sigmoid"}),
    "lenet_dlg": ({}, {"activation": "relu", "initialisation": "kaiming"}),
    "small_cnn": ({"width": 8}, {"width": 8, "activation": "tanh"}),
    "convnet": ({"width": 2},),
    "resnet20": ({},),
    "vgg11": ({"hidden": 32, "batch_norm": True}, {"hidden": 256}),
    "resnet18": ({},),
    "mobilenet_v2": ({},),
}
LARGE = ("vgg11", "resnet18", "mobilenet_v2")  # trained on less
STATES = (
    "untrained",
    "trained",
    "fine-tuned",
    "zero head",
    "zero head, one round",
    "few classes",
    "pruned",
    "half precision",
    "weight decay",
    "unbalanced bias",
    "zero gammas",
)
BUNDLED = ("digits", "faces", "photographs")
SHARED = ("cifar10.npz", "cifar100.npz", "svhn.npz")
LEAST = {"vgg11": 32, "lenet5": 20, "resnet18": 32, "mobilenet_v2": 32}  # pixels
LARGEST = 16  # pixels, where the architecture can do with it


class VisionTransformer(nn.Module):
    def __init__(self, channels: int, size: int, classes: int, width: int = 32) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 4) ** 2, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, batch_first=True, dropout=0.0)
        self.encoder, self.norm = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.LayerNorm(width)
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.encoder(tokens)).mean(1))


class ResidualPerceptron(nn.Module):
    def __init__(self, channels: int, size: int, classes: int, width: int = 64) -> None:
        super().__init__()
        self.first = nn.Linear(channels * size**2, width)
        self.blocks = nn.ModuleList([nn.Linear(width, width) for _ in range(3)])
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs.flatten(1))
        for block in self.blocks:
            hidden = hidden + block(hidden).relu()
        return self.head(hidden)


def perceptron(width: int, *, bias: bool = True, norm: bool = False) -> Callable[[int, int, int], nn.Module]:
    def build(channels: int, size: int, classes: int) -> nn.Module:
        layers = [nn.Flatten(), nn.Linear(channels * size**2, width, bias=bias), nn.GELU() if norm else nn.ReLU()]
        return nn.Sequential(*layers, *([nn.LayerNorm(width)] if norm else []), nn.Linear(width, classes, bias=bias))

    return build


def logistic_regression(channels: int, size: int, classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, classes))


OTHERS: dict[str, Callable[[int, int, int], nn.Module]] = {
    "vision transformer": VisionTransformer,
    "residual perceptron": ResidualPerceptron,
    "tiny perceptron": perceptron(5),
    "perceptron without bias": perceptron(64, bias=False),
    "perceptron with layer norm": perceptron(64, norm=True),
    "logistic regression": logistic_regression,
}


@dataclass(frozen=True)
class Member:
    """An honest model, what it was a round before, and a client's own data."""

    architecture: str
    state: str
    before: nn.Module
    model: nn.Module
    batch: Batch

    @property
    def classes(self) -> int:
        with torch.no_grad():
            return self.model(self.batch.inputs[:2]).shape[1]


class Zoo:
    """Honest models in every state, made from a seed; each training serves all the states that follow from it.

    `unseen`: of architectures and initialisations that no threshold was set with, some of them trained until they are sure.
    """

    def __init__(self, seed: int, data: Path | None = None, unseen: bool = False) -> None:
        self.unseen = unseen
        self.rng = torch.Generator().manual_seed(seed)
        paths = BUNDLED if data is None else [str(data / name) for name in SHARED]
        self.sets = {name: load_images(name) for name in paths}
        self.waiting: list[Member] = []

    def draw(self) -> Member:
        if not self.waiting:
            self.waiting = self.family()
        return self.waiting.pop(int(torch.randint(len(self.waiting), (), generator=self.rng)))

    def family(self) -> list[Member]:
        """One architecture on one data set, in every state."""
        name = self.pick(list(UNSEEN) if self.unseen else [*REGISTERED, *OTHERS])
        images = self.sets[self.pick(list(self.sets))]
        size = max(LEAST.get(name, 8), min(images.images.shape[-1], LARGEST))
        pixels, labels = interpolate(images.images, (size, size), mode="bilinear", antialias=True), images.labels
        classes = len(images.class_names)
        if self.unseen and classes <= 10 and float(torch.rand((), generator=self.rng)) < 0.2:
            labels, classes = labels % 2, 2
        if float(torch.rand((), generator=self.rng)) < 0.2:  # many more classes than the client has
            classes = self.pick((100, 1000)) if classes < 100 else 1000
        order = torch.randperm(len(pixels), generator=self.rng)
        chosen, own = order[: 48 if name in LARGE else 128], order[-self.pick((8, 16, 32, 64)) :]
        data, batch = Batch(pixels[chosen], labels[chosen]), Batch(pixels[own], labels[own])
        untrained = self.build(name, pixels.shape[1], size, classes)
        epochs = 1 if name in LARGE else self.pick((2, 5, 40) if self.unseen else (2, 5))
        trained = self.train(untrained, data, epochs=epochs, rate=2e-3)
        states = [state for state in STATES if len(labels.unique()) == classes or "one round" not in state]
        before = {state: self.bring(untrained, trained, data, state) for state in states}
        after = {state: self.finish(self.next_round(model, data, state), state) for state, model in before.items()}
        return [Member(name, state, self.finish(before[state], state).eval(), after[state].eval(), batch) for state in states]

    def build(self, name: str, channels: int, size: int, classes: int) -> nn.Module:
        seed = int(torch.randint(10**6, (), generator=self.rng))
        if name in REGISTERED:
            return load_model(name, {**self.pick(REGISTERED[name]), "classes": classes, "channels": channels, "size": size}, None, seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            if name in UNSEEN:
                return initialise(UNSEEN[name](channels, size, classes), self.pick(list(INITIALISATIONS)))
            return OTHERS[name](channels, size, classes)

    def bring(self, untrained: nn.Module, trained: nn.Module, data: Batch, state: str) -> nn.Module:
        """The model of the round before."""
        if state in ("untrained", "zero gammas"):
            return copy.deepcopy(untrained)
        if state == "weight decay":
            return self.train(untrained, data, epochs=2, rate=2e-3, decay=self.pick((0.1, 1.0, 5.0)))
        if state == "few classes":
            kept = data.targets <= data.targets.median()
            return self.train(untrained, Batch(data.inputs[kept], data.targets[kept]), epochs=3, rate=2e-3)
        model = copy.deepcopy(trained)
        if state in ("fine-tuned", "zero head", "zero head, one round"):  # a new head on trained layers
            fresh = head_of(model)
            with torch.no_grad():
                fresh.weight.copy_(torch.randn(fresh.weight.shape, generator=self.rng) / fresh.in_features**0.5)
                if state != "fine-tuned":
                    fresh.weight.zero_()
                    _ = None if fresh.bias is None else fresh.bias.zero_()
        return model

    def next_round(self, model: nn.Module, data: Batch, state: str) -> nn.Module:
        if state in ("untrained", "zero gammas", "zero head"):
            return copy.deepcopy(model)
        return self.train(model, data, epochs=1, rate=self.pick((1e-4, 1e-3)), decay=0.1 if state == "weight decay" else 0.0)

    def finish(self, model: nn.Module, state: str) -> nn.Module:
        """What is done to a model after training."""
        model = copy.deepcopy(model)
        share, slope = self.pick((0.5, 0.8, 0.9, 0.95)), self.pick((-2.0, -4.6, -6.9))
        head = head_of(model)
        with torch.no_grad():
            if state == "pruned":
                for parameter in (p for p in model.parameters() if p.ndim >= 2):
                    cut = parameter.abs().flatten().kthvalue(max(1, int(share * parameter.numel()))).values
                    parameter.masked_fill_(parameter.abs() <= cut, 0.0)
            if state == "half precision":
                for value in [*model.parameters(), *model.buffers()]:
                    if value.is_floating_point():
                        value.copy_(value.half().to(value))
            if state == "unbalanced bias" and head.bias is not None:  # the logarithm of class shares down to 1 in 1,000
                head.bias.add_(torch.linspace(0, slope, head.out_features))
            if state == "zero gammas":
                for module in model.modules():
                    if isinstance(module, nn.BatchNorm2d):
                        module.weight.zero_()
        return model

    def train(self, model: nn.Module, data: Batch, *, epochs: int, rate: float, decay: float = 0.0) -> nn.Module:
        model = copy.deepcopy(model).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=decay)
        for _ in range(epochs):
            for chosen in torch.randperm(len(data.inputs), generator=self.rng).split(32):
                if len(chosen) < 2:  # batch norm cannot be trained on one
                    continue
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(data.inputs[chosen]), data.targets[chosen]).backward()
                optimizer.step()
        return model

    def pick(self, choices):
        return choices[int(torch.randint(len(choices), (), generator=self.rng))]


def head_of(model: nn.Module) -> nn.Linear:
    return [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
