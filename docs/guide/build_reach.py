"""Writes docs/guide/reach.md: which surface of which model and loss is proved, attempted or not read. Every cell is one run.

python docs/guide/build_reach.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

import dosimeter as dm
from dosimeter.models.transformer import Transformer

PAGE = Path(__file__).with_name("reach.md")
HEAD = """# What is read of which model

Each cell is one small run, which `python docs/guide/build_reach.py` repeats: an untrained model, a batch of three, no defense.

- **proved**: a method certifies at least a part from the update alone, under its premises.
- **attempted**: a method gives an answer, which a score has to judge.
- **not read**: the methods refuse this setting. That says nothing about safety.
- **impossible**: a theorem, named in the refusal, forbids it to every method.

The proofs rest on these facts.

- Labels and features: the head's gradient is Σ (p − y) fᵀ, and few samples leave it a low rank ([the last layer](last-layer.md)). Other
  losses and targets: the same product of slopes and features, taken apart by label vectors of zeros and ones, or by the zeros of a ReLU.
  Without either, any mixing of the samples has the same gradient at the head. The slope of a sample names its label by the client's own
  loss. A sigmoid, softmax or tanh behind the head counts as a part of the loss.
- Label vectors need the gradient of the head's bias, or features that are never negative: without biases, a sample's feature with the sign
  turned and every label exchanged has the same gradient.
- Maps: the matrices of a kernel's offsets are shifts of one another ([maps](maps.md)).
- Tokens: the row of an absent token is zero, and a layer's gradient has the vectors that it received as its row space ([texts](text.md)).

A head with a class at each place or position has a sum over all of these as its gradient. Its rank is at most the number of classes, so
that it does not tell more places apart: labels and features are not read there. Maps tell the places apart where a layer has as many
channels as the batch has places. The maps that the last layer receives are the features.

"""


@dataclass(frozen=True)
class Setting:
    """A model, what it is trained on, and its loss."""

    family: str
    loss_name: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dm.Batch]
    loss: Any = None


def _pixels(targets: Any) -> Callable[[], dm.Batch]:
    return lambda: dm.Batch(torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(3)), targets)


def _linear(bias: bool) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 8, bias=bias))


def _one(targets: Any) -> Callable[[], dm.Batch]:
    return lambda: dm.Batch(torch.rand(1, 1, 8, 8, generator=torch.Generator().manual_seed(3)), targets)


def _texts(targets: Any = None) -> Callable[[], dm.Batch]:
    ids = torch.randint(200, (3, 6), generator=torch.Generator().manual_seed(3))
    return lambda: dm.Batch(ids, ids.roll(-1, 1) if targets is None else targets)


def _dense(outputs: int, activation: type[nn.Module] = nn.ReLU, *rest: nn.Module) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 128), activation(), nn.Linear(128, outputs), *rest)


def _convolutions() -> nn.Module:
    stem = [nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*stem, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def _segments() -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 64, 3, 1, 1), nn.ReLU(), nn.Conv2d(64, 5, 1))


def _transformer(kind: Any, **options: Any) -> Callable[[], nn.Module]:
    return lambda: Transformer(kind, vocabulary=200, width=32, layers=2, heads=4, positions=8, **options)


def _tagger() -> nn.Module:
    model = Transformer("bert", vocabulary=200, width=32, layers=2, heads=4, positions=8)
    model.head = nn.Linear(32, 5)
    return model


class Adapted(nn.Module):
    """LoRA after a first round: W x + B A x with W frozen and B not zero."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 16, bias=False), nn.Linear(16, layer.out_features, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))


def _lora() -> nn.Module:
    """A frozen decoder with adapters, and a head that is trained."""
    model = Transformer("gpt2", vocabulary=200, width=32, layers=2, heads=4, positions=8, classes=10).requires_grad_(False)
    for block in model.blocks:
        block.attention.query, block.expand = Adapted(block.attention.query), Adapted(block.expand)
    model.head.requires_grad_(True)
    return model


class Categories(nn.Module):
    """An embedding for each of six columns of categories."""

    def __init__(self) -> None:
        super().__init__()
        self.columns, self.rest = nn.ModuleList(nn.Embedding(200, 8) for _ in range(6)), _dense(10)()
        self.rest[1] = nn.Linear(48, 128)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.rest(torch.cat([column(ids[:, place]) for place, column in enumerate(self.columns)], 1))


def _without_places() -> nn.Module:
    model = _transformer("gpt2", classes=10)()
    nn.init.zeros_(model.places.weight)
    return model


class Patches(nn.Module):
    """A small vision transformer: patches of four pixels a side, one encoder layer, the mean over patches."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.places = nn.Conv2d(1, 32, 4, 4), nn.Parameter(0.02 * torch.randn(4, 32))
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)
        self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        patches = self.embed(images).flatten(2).transpose(1, 2) + self.places
        return self.head(self.norm(self.encoder(patches)).mean(1))


class Recurrent(nn.Module):
    """An LSTM whose last state is classified, over the rows of a picture or over the vectors of tokens."""

    def __init__(self, vocabulary: int | None = None) -> None:
        super().__init__()
        self.tokens = None if vocabulary is None else nn.Embedding(vocabulary, 8)
        self.lstm, self.head = nn.LSTM(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        steps = inputs.flatten(1, -2) if self.tokens is None else self.tokens(inputs)
        return self.head(self.lstm(steps)[0][:, -1])


class LastToken(nn.Module):
    """A classifier as Transformers makes it of a decoder: logits at every position, of which the last is returned. Without biases."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = Transformer("gpt2", vocabulary=200, width=32, layers=2, heads=4, positions=8)
        self.decoder.head = nn.Linear(32, 10, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(ids)[:, -1]


class Boxes(nn.Module):
    """Classes and the four numbers of a box from one layer, as the head of a detector for one object."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU()), nn.Linear(128, 14)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images))


class TwoLayers(nn.Module):
    """Classes and a box from a layer each, returned as a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU())
        self.classes, self.box = nn.Linear(128, 10), nn.Linear(128, 4)

    def forward(self, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.body(images)
        return self.classes(features), self.box(features)


def loss_of_both(outputs: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    """The same loss, of what the model returns."""
    return box_loss(torch.cat(outputs, 1), targets)


def box_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Cross-entropy on the class, and the absolute error of the box."""
    return nn.functional.cross_entropy(outputs[:, :10], targets[:, 0].long()) + (outputs[:, 10:] - targets[:, 1:]).abs().mean()


def _small_segments() -> nn.Module:
    stem = [nn.Conv2d(1, 64, 3, 2, 1), nn.ReLU(), nn.Conv2d(64, 64, 3, 1, 1), nn.ReLU()]
    return nn.Sequential(*stem, nn.Conv2d(64, 5, 1))


WEIGHTS = torch.full((8,), 3.0)
IDS = torch.tensor([3, 1, 4])
MANY = torch.tensor([[1, 0, 1, 0, 0, 0, 0, 1], [0, 1, 0, 0, 1, 0, 1, 1], [0, 0, 0, 1, 0, 0, 0, 0]]).float()
NUMBERS = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))
PLACES = torch.randint(5, (3, 8, 8), generator=torch.Generator().manual_seed(5))
IGNORED = torch.tensor([3, -100, 4])
BOXED = torch.cat([IDS[:, None], torch.rand(3, 4, generator=torch.Generator().manual_seed(6))], 1)
TAGS = torch.randint(5, (3, 6), generator=torch.Generator().manual_seed(7))
SETTINGS = [
    Setting("dense layers", "cross-entropy", _dense(10), _pixels(IDS)),
    Setting("dense layers", "binary cross-entropy, several labels", _dense(8), _pixels(MANY), nn.BCEWithLogitsLoss()),
    Setting("the same, with GELU", "binary cross-entropy, several labels", _dense(8, nn.GELU), _pixels(MANY), nn.BCEWithLogitsLoss()),
    Setting(
        "dense layers with tanh, a head without biases",
        "binary cross-entropy, several labels",
        _linear(False),
        _pixels(MANY),
        nn.BCEWithLogitsLoss(),
    ),
    Setting(
        "dense layers",
        "binary cross-entropy, positive weights",
        _dense(8),
        _pixels(MANY),
        nn.BCEWithLogitsLoss(pos_weight=torch.full((8,), 3.0)),
    ),
    Setting("dense layers, a sigmoid behind the head", "nn.BCELoss", _dense(8, nn.GELU, nn.Sigmoid()), _pixels(MANY), nn.BCELoss()),
    Setting("dense layers", "mean squared error", _dense(8), _pixels(NUMBERS), nn.MSELoss()),
    Setting("the same, with GELU", "mean squared error", _dense(8, nn.GELU), _pixels(NUMBERS), nn.MSELoss()),
    Setting("dense layers, a tanh behind the head", "mean squared error", _dense(8, nn.ReLU, nn.Tanh()), _pixels(NUMBERS), nn.MSELoss()),
    Setting("dense layers, one number", "mean squared error", _dense(1, nn.ReLU, nn.Flatten(0)), _pixels(NUMBERS[:, 0]), nn.MSELoss()),
    Setting("dense layers", "Huber", _dense(8), _pixels(NUMBERS), nn.HuberLoss(delta=5.0)),
    Setting("dense layers", "class weights", _dense(10), _pixels(IDS), nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))),
    Setting("dense layers", "one target ignored", _dense(10), _pixels(IGNORED), nn.CrossEntropyLoss(ignore_index=-100)),
    Setting("dense layers", "a function of your own", _dense(8), _pixels(NUMBERS), lambda z, t: (z - t).abs().pow(3).mean()),
    Setting("dense layers, one logit, a batch of one", "binary cross-entropy", _dense(1), _one(torch.ones(1, 1)), nn.BCEWithLogitsLoss()),
    Setting("convolutions", "cross-entropy", _convolutions, _pixels(IDS)),
    Setting("convolutions, a class at each pixel", "cross-entropy", _segments, _pixels(PLACES)),
    Setting("convolutions, a class at each of few places", "cross-entropy", _small_segments, _pixels(PLACES[:, ::2, ::2])),
    Setting("a class and a box from one layer", "a function of your own", Boxes, _pixels(BOXED), box_loss),
    Setting("a class and a box from two layers, as a tuple", "a function of your own", TwoLayers, _pixels(BOXED), loss_of_both),
    Setting("a small vision transformer", "cross-entropy", Patches, _pixels(IDS)),
    Setting("LSTM over numbers", "cross-entropy", Recurrent, _pixels(IDS)),
    Setting("dense layers over embeddings of categories", "cross-entropy", Categories, _texts(IDS)),
    Setting("LSTM over texts", "cross-entropy", lambda: Recurrent(200), _texts(IDS)),
    Setting("decoder over texts, classes", "cross-entropy", _transformer("gpt2", classes=10), _texts(IDS)),
    Setting("the same, without position embeddings", "cross-entropy", _without_places, _texts(IDS)),
    Setting("decoder over texts, classes at its last token", "cross-entropy", LastToken, _texts(IDS)),
    Setting("encoder over texts, classes", "cross-entropy", _transformer("bert", classes=10), _texts(IDS)),
    Setting("decoder over texts, LoRA and a trained head", "cross-entropy", _lora, _texts(IDS)),
    Setting("encoder over texts, a class at each token", "cross-entropy", _tagger, _texts(TAGS)),
    Setting("decoder over texts, next token", "cross-entropy at each position", _transformer("gpt2"), _texts()),
    Setting("the same, with a shared weight", "cross-entropy at each position", _transformer("gpt2", tied=True), _texts()),
]
Run = Callable[[dm.Exposure], Any]
SURFACES: dict[str, list[Run]] = {
    "labels": [lambda e, name=name: dm.recover_labels(e, name) for name in ("subspace", "head_slopes", "ilrg", "zlg")],
    "targets": [dm.recover_targets],
    "features": [lambda e, name=name: dm.recover_features(e, name) for name in ("subspace", "head_slopes")],
    "maps": [dm.recover_maps],
    "inputs": [lambda e: dm.reconstruct(e, "dlg", labels=None, steps=2)],
    "tokens": [lambda e, name=name: dm.recover_tokens(e, name) for name in ("embedding_rows", "dager")]
    + [lambda e: dm.recover_tokens(e, "tag", steps=2)],
}


def cell(exposure: dm.Exposure, surface: str) -> str:
    outcomes = {_outcome(run, exposure) for run in SURFACES[surface]}
    return next(outcome for outcome in ("proved", "attempted", "impossible", "not read") if outcome in outcomes)


def _outcome(run: Run, exposure: dm.Exposure) -> str:
    try:
        found = run(exposure)
        if found.outcome in (dm.Outcome.CRASHED, dm.Outcome.NOT_ATTEMPTED):
            return "not read"
        return "proved" if _proves(found) else "attempted"
    except dm.Impossible:
        return "impossible"
    except dm.Refused:
        return "not read"


def _proves(found: Any) -> bool:
    certified = getattr(found, "certified", False)
    return bool(certified.any()) if isinstance(certified, torch.Tensor) else bool(certified)


def page() -> str:
    lines = [f"| model | loss | {' | '.join(SURFACES)} |", "|---|---" + "|---" * len(SURFACES) + "|"]
    for setting in SETTINGS:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = setting.build().eval()
        exposure = dm.observe(model, setting.batch(), loss=setting.loss)
        cells = [cell(exposure, surface) for surface in SURFACES]
        lines.append(f"| {setting.family} | {setting.loss_name} | {' | '.join(cells)} |")
    return HEAD + "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
