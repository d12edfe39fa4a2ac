"""Certified tokens and texts: true where the private texts hold them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Generator, Tensor, nn

import dosimeter as dm
from certificate_kinds.kind import Kind, Row

METHODS = ("embedding_rows", "dager")


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What a kind of draw fixes; the rest is drawn."""

    language_model: bool = False  # one target a position; else one class a text
    tied: bool = False  # the output layer shares the embedding's weight
    duplicate: bool = False
    lookups: str = ""  # what the model looks up beside its texts' tokens, or in their place
    protocol: tuple[tuple[str, Any], ...] = ()  # options of `observe`
    wrong_size: int = 0  # added to the declared size
    breaks: str = ""


def kinds(data: Path | None) -> list[Kind]:
    if find_spec("dosimeter.models.transformer") is None:  # older code, with which results are compared
        return []
    return [
        Kind(name=f"tokens/{method}: {name}", draw=partial(certified_tokens, method, setting), breaks=setting.breaks)
        for method in METHODS
        for name, setting in settings().items()
    ]


def settings() -> dict[str, Setting]:
    def behind(name: str, **options: Any) -> Setting:
        return Setting(protocol=(("defenses", (dm.defense(name, **options),)),))

    return {
        "classes of texts": Setting(),
        "language model": Setting(language_model=True),
        "tied output layer": Setting(language_model=True, tied=True),
        "a duplicate": Setting(duplicate=True),
        "no size declared": Setting(protocol=(("declare_batch_size", False),)),
        "local steps": Setting(protocol=(("training", dm.FedAvg(learning_rate=0.01, steps=3)),)),
        "behind clipping": behind("clipping", max_norm=0.05),
        "behind 16-bit quantisation": behind("quantisation", bits=16),
        "behind 6-bit quantisation": behind("quantisation", bits=6),
        "behind pruning": behind("pruning", ratio=0.5),
        "behind faint noise": behind("gaussian_noise", std=1e-7),
        "a beginning by the model": Setting(lookups="beginning"),
        "a beginning from the weight": Setting(lookups="beginning from the weight"),
        "texts moved by one": Setting(lookups="moved"),
        "hashed tokens": Setting(lookups="hashed"),
        "unknown words": Setting(lookups="unknown words"),
        "dropped words": Setting(lookups="dropped words"),
        "one text too many declared": Setting(wrong_size=1, breaks="batch size"),
        "one text too few declared": Setting(wrong_size=-1, breaks="batch size"),
    }


class Reader(nn.Module):
    """A small encoder that looks up other tokens than those of its texts."""

    def __init__(self, lookups: str, vocabulary: int, width: int, length: int, classes: int) -> None:
        super().__init__()
        self.lookups, self.vocabulary = lookups, vocabulary
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(length, width))
        self.layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True)
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self._vectors(ids) + self.places).mean(1))

    def _vectors(self, ids: Tensor) -> Tensor:
        first = torch.full_like(ids[:, :1], self.vocabulary // 7)
        match self.lookups:
            case "beginning":
                return torch.cat([self.tokens(first), self.tokens(ids)[:, 1:]], 1)
            case "beginning from the weight":
                return self.tokens(ids) + self.tokens.weight[0]
            case "moved":
                return self.tokens(ids) + self.tokens(torch.cat([first, ids[:, :-1]], 1))
            case "hashed":
                return self.tokens(ids % (self.vocabulary // 2))
            case "unknown words":
                return self.tokens(ids.where(ids < 0.9 * self.vocabulary, 3))
            case _:
                return self.tokens(ids.where(torch.rand(ids.shape) > 0.2, 2) if self.training else ids)


def certified_tokens(method: str, setting: Setting, seed: int) -> list[Row]:
    """One row a token of the batch, one for each token or text that is proved and wrong, and one a proved text."""
    from dosimeter.models.transformer import Transformer

    rng = Generator().manual_seed(seed)

    def pick(*choices: Any) -> Any:
        return choices[int(torch.randint(len(choices), (1,), generator=rng))]

    vocabulary, width, length, count = pick(60, 300, 1000), pick(32, 64, 96), pick(4, 8, 12), pick(1, 2, 3, 4)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        shape = {"vocabulary": vocabulary, "width": width, "layers": pick(1, 2), "heads": 4, "positions": length}
        head = {"tied": setting.tied} if setting.language_model else {"classes": pick(2, 3, 10)}
        model = Transformer("gpt2" if setting.language_model else pick("gpt2", "bert"), **shape, **head).eval()
        if setting.lookups:
            model = Reader(setting.lookups, vocabulary, width, length, head["classes"]).train(setting.lookups == "dropped words")
    texts = torch.randint(vocabulary, (count, length), generator=rng)
    if setting.duplicate:
        texts[-1] = texts[0]
    targets = texts.roll(-1, 1) if setting.language_model else torch.randint(head["classes"], (count,), generator=rng)
    exposure = dm.observe(model, dm.Batch(texts, targets), **dict(setting.protocol))
    if setting.wrong_size:
        exposure = replace(exposure, public=replace(exposure.public, batch_size=max(count + setting.wrong_size, 1)))
    found = dm.recover_tokens(exposure, method, seed=seed)
    private, written = set(texts.flatten().tolist()), {tuple(text) for text in texts.tolist()}
    rows = [
        Row(certified=token in found.certified, true=True, recovered=token in found.tokens, premises=found.premises) for token in private
    ]
    rows += [Row(certified=True, true=False, recovered=False, premises=found.premises) for _ in found.certified - private]
    if found.complete and private - found.tokens:
        rows.append(Row(certified=True, true=False, recovered=False, premises=found.premises))
    for text, sure in zip(found.sequences, found.certified_sequences):
        whole = text in written or any(one[: len(text)] == text for one in written)
        rows.append(Row(certified=sure, true=whole, recovered=whole, premises=found.premises))
    return rows
