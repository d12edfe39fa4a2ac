"""Transformers over token ids, in the shapes of GPT-2 and BERT. They need no other package, and their weights are random."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

DEVIATION = 0.02  # of every initial weight, as GPT-2 and BERT have it


class Attention(nn.Module):
    """Multi-head attention with one projection each for queries, keys and values."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        """(B, T, H) and (B, T) bool, True where a position is shown -> (B, T, H)."""
        batch, length, width = inputs.shape
        query, key, value = (
            layer(inputs).reshape(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-1, -2) / (width // self.heads) ** 0.5  # (B, heads, T, T)
        shown = torch.ones(length, length, dtype=torch.bool, device=inputs.device)
        shown = shown.tril() if self.causal else shown
        if mask is not None:
            shown = shown & mask[:, None, None, :].bool()
        weights = scores.masked_fill(~shown, torch.finfo(scores.dtype).min).softmax(-1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each beside a shortcut. GPT-2 and ViT norm before them, BERT behind them."""

    def __init__(self, width: int, heads: int, causal: bool, hidden: int, *, before: bool | None = None) -> None:
        super().__init__()
        self.before = causal if before is None else before
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, causal)
        self.expand, self.contract = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, inputs: Tensor, mask: Tensor | None) -> Tensor:
        perceptron: Callable[[Tensor], Tensor] = lambda x: self.contract(nn.functional.gelu(self.expand(x)))  # noqa: E731
        if self.before:
            inputs = inputs + self.attention(self.norm1(inputs), mask)
            return inputs + perceptron(self.norm2(inputs))
        inputs = self.norm1(inputs + self.attention(inputs, mask))
        return self.norm2(inputs + perceptron(inputs))


class Transformer(nn.Module):
    """A decoder as GPT-2 (`kind="gpt2"`: causal, norms before) or an encoder as BERT (`kind="bert"`: both ways, norms behind).

    Radford et al., "Language Models are Unsupervised Multitask Learners", 2019; Devlin et al., "BERT", NAACL 2019. With `classes` the
    model classifies a text by its last token (GPT-2) or its first (BERT); without, it has an output at each position over the
    vocabulary, whose layer shares the embedding's weight where `tied` is set.
    """

    def __init__(
        self,
        kind: Literal["gpt2", "bert"] = "gpt2",
        *,
        vocabulary: int = 50257,
        width: int = 768,
        layers: int = 12,
        heads: int = 12,
        positions: int = 512,
        hidden: int | None = None,
        classes: int | None = None,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.causal = kind == "gpt2"
        self.tokens, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, heads, self.causal, hidden or 4 * width) for _ in range(layers))
        self.classes = classes
        self.head = nn.Linear(width, classes or vocabulary, bias=classes is not None)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=DEVIATION)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        """(B, T) token ids -> (B, classes), or (B, T, vocabulary)."""
        length = input_ids.shape[1]
        hidden = self.tokens(input_ids) + self.places(torch.arange(length, device=input_ids.device))
        hidden = hidden if self.causal else self.norm(hidden)
        for block in self.blocks:
            hidden = block(hidden, attention_mask)
        hidden = self.norm(hidden) if self.causal else hidden
        if self.classes is None:
            return self.head(hidden)
        last = torch.full_like(input_ids[:, 0], length - 1) if attention_mask is None else attention_mask.long().sum(1) - 1
        return self.head(hidden[torch.arange(len(hidden), device=hidden.device), last] if self.causal else hidden[:, 0])
