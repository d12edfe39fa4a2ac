"""Texts of the server's own: random ids, as each embedding takes them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, nn

from dosimeter.network.category_columns import random_rows
from dosimeter.network.token_inputs import find_token_embedding, main_of, with_ids
from dosimeter.types import NamedInputs, Refused


def random_texts(model: nn.Module, blank: Any, count: int, rng: Generator) -> Any:
    """Texts of tokens drawn from the whole vocabulary, each as often as any other, with normal numbers where the model takes some."""
    main = main_of(blank)
    try:
        vocabulary = find_token_embedding(model, blank).vocabulary
        ids = torch.randint(vocabulary, (count, main.shape[1]), generator=rng, device=rng.device)
    except Refused:  # as where each column of ids has an embedding of its own
        ids = random_rows(model, blank, count, rng)
    texts = with_ids(blank, ids.to(main))
    if not isinstance(texts, NamedInputs):
        return texts
    return texts.each(lambda one: torch.randn(one.shape, generator=rng, device=rng.device).to(one) if one.is_floating_point() else one)
