"""Architectures that no threshold of `dosimeter inspect` was set with: what the checks say of a stranger's honest model."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Build = Callable[[int, int, int], nn.Module]  # channels, pixels a side, classes


class Mixer(nn.Module):
    """An MLP-Mixer: patches that are mixed along places and along channels in turn."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 32, blocks: int = 3) -> None:
        super().__init__()
        places = (size // 4) ** 2
        self.patches = nn.Conv2d(channels, width, 4, 4)
        self.along_places = nn.ModuleList([_block(places, places) for _ in range(blocks)])
        self.along_channels = nn.ModuleList([_block(width, 2 * width) for _ in range(blocks)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(2 * blocks + 1)])
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.patches(inputs).flatten(2).transpose(1, 2)
        for k, (places, channels) in enumerate(zip(self.along_places, self.along_channels)):
            tokens = tokens + places(self.norms[2 * k](tokens).transpose(1, 2)).transpose(1, 2)
            tokens = tokens + channels(self.norms[2 * k + 1](tokens))
        return self.head(self.norms[-1](tokens).mean(1))


class ClassToken(nn.Module):
    """A vision transformer whose patches come from a linear layer and whose head reads a class token, with dropout."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 48) -> None:
        super().__init__()
        self.unfold = nn.Unfold(4, stride=4)
        self.embed = nn.Linear(16 * channels, width)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(0.02 * torch.randn(1, (size // 4) ** 2 + 1, width))
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, activation="gelu", batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        tokens = self.embed(self.unfold(inputs).transpose(1, 2))
        tokens = torch.cat([self.token.expand(len(tokens), -1, -1), tokens], 1) + self.position
        return self.head(self.norm(self.encoder(tokens)[:, 0]))


class Dense(nn.Module):
    """A DenseNet: every layer receives what all layers of its block before it gave."""

    def __init__(self, channels: int, size: int, classes: int, growth: int = 8) -> None:
        super().__init__()
        self.stem, width = nn.Conv2d(channels, 16, 3, padding=1, bias=False), 16
        self.blocks, self.transitions = nn.ModuleList(), nn.ModuleList()
        for _ in range(2):
            layers = nn.ModuleList()
            for _ in range(3):
                layers.append(
                    nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, growth, 3, padding=1, bias=False), nn.Dropout(0.2))
                )
                width += growth
            self.blocks.append(layers)
            self.transitions.append(
                nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width // 2, 1, bias=False), nn.AvgPool2d(2))
            )
            width //= 2
        self.norm, self.head = nn.BatchNorm2d(width), nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.stem(inputs)
        for layers, transition in zip(self.blocks, self.transitions):
            assert isinstance(layers, nn.ModuleList)
            for layer in layers:
                hidden = torch.cat([hidden, layer(hidden)], 1)
            hidden = transition(hidden)
        return self.head(self.norm(hidden).relu().mean((2, 3)))


class TiedAutoencoder(nn.Module):
    """A classifier behind a perceptron whose second layer is the first one's transpose, as autoencoders are pretrained."""

    def __init__(self, channels: int, size: int, classes: int, width: int = 96) -> None:
        super().__init__()
        self.encode = nn.Linear(channels * size**2, width)
        self.restored = nn.Parameter(torch.zeros(channels * size**2))
        self.head = nn.Linear(width, classes)

    def forward(self, inputs: Tensor) -> Tensor:
        code = self.encode(inputs.flatten(1)).relu()
        again = nn.functional.linear(code, self.encode.weight.T, self.restored)
        return self.head(self.encode(again).relu() + code)


class ScaledCosine(nn.Module):
    """Convolutions under a head without bias that reads normalised features, scaled, as in face recognition."""

    def __init__(self, channels: int, size: int, classes: int) -> None:
        super().__init__()
        self.below = grouped(channels, size, classes)[:-1]
        self.head = nn.Linear(32, classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.head(16 * nn.functional.normalize(self.below(inputs)))


def _block(width: int, hidden: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))


def grouped(channels: int, size: int, classes: int) -> nn.Sequential:
    """Convolutions with group norm."""
    layers: list[nn.Module] = []
    for before, after, stride in ((channels, 16, 1), (16, 32, 2), (32, 32, 2)):
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.GroupNorm(4, after), nn.SiLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes))


def strided(channels: int, size: int, classes: int) -> nn.Sequential:
    """Plain convolutions, and a perceptron with dropout on top of them."""
    side = (size + 3) // 4
    return nn.Sequential(
        nn.Conv2d(channels, 12, 5, 2, 2),
        nn.ReLU(),
        nn.Conv2d(12, 24, 5, 2, 2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.5),
        nn.Linear(24 * side**2, 128),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(128, classes),
    )


def wide(channels: int, size: int, classes: int) -> nn.Sequential:
    """A perceptron as wide as an inserted layer."""
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * size**2, 1000), nn.ReLU(), nn.Linear(1000, classes))


def maxout(channels: int, size: int, classes: int) -> nn.Sequential:
    """A perceptron on normalised input, batch norm between layers, no bias under it."""
    inputs = channels * size**2
    return nn.Sequential(
        nn.Flatten(),
        nn.BatchNorm1d(inputs),
        nn.Linear(inputs, 128, bias=False),
        nn.BatchNorm1d(128),
        nn.Hardswish(),
        nn.Linear(128, 64, bias=False),
        nn.BatchNorm1d(64),
        nn.ELU(),
        nn.Linear(64, classes),
    )


UNSEEN: dict[str, Build] = {
    "mixer": Mixer,
    "class token transformer": ClassToken,
    "densenet": Dense,
    "tied autoencoder": TiedAutoencoder,
    "scaled cosine": ScaledCosine,
    "group norm": grouped,
    "dropout perceptron on convolutions": strided,
    "perceptron of 1,000": wide,
    "perceptron on batch norm": maxout,
}


def _normal(weight: Tensor) -> Tensor:
    return nn.init.trunc_normal_(weight, std=0.02)


def _wide_normal(weight: Tensor) -> Tensor:
    return nn.init.normal_(weight, std=0.3)


def _sparse(weight: Tensor) -> Tensor:
    return nn.init.kaiming_normal_(weight).mul_(torch.rand_like(weight) < 0.1)


INITIALISATIONS: dict[str, Callable[[Tensor], Tensor] | None] = {
    "pytorch": None,
    "kaiming": nn.init.kaiming_normal_,
    "xavier": nn.init.xavier_uniform_,
    "orthogonal": nn.init.orthogonal_,
    "normal of .02": _normal,
    "normal of .3": _wide_normal,
    "sparse": _sparse,
}


def initialise(model: nn.Module, name: str) -> nn.Module:
    """Draw every weight matrix anew, biases zero, as that initialisation has it; from the global generator."""
    draw = INITIALISATIONS[name]
    if draw is not None:
        with torch.no_grad():
            for module in model.modules():
                if isinstance(module, nn.Linear | nn.Conv2d):
                    draw(module.weight)
                    _ = None if module.bias is None else nn.init.zeros_(module.bias)
    return model
