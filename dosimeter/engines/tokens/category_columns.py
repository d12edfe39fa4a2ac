"""Whether the rows of embeddings that columns of ids have to themselves tell the categories of a batch: shown on rows of our own."""

from __future__ import annotations

import torch

from dosimeter.engines.tokens.lookups import rows_with_slopes
from dosimeter.interfaces import Exposure
from dosimeter.network.category_columns import Column, received_ids
from dosimeter.network.token_inputs import main_of, with_ids


def doubts_of(exposure: Exposure, columns: list[Column]) -> list[str]:
    """Why a row of each column's may be there without its category; "" where it may not."""
    return [_doubt(exposure, column, columns) for column in columns]


def _doubt(exposure: Exposure, column: Column, columns: list[Column]) -> str:
    """Each category of the column is looked up at its own row, and a sample moves no other row of the table than its columns'."""
    model, blank, main = exposure.model, exposure.public.blank, main_of(exposure.public.blank)
    every = torch.arange(column.size, device=main.device, dtype=main.dtype)
    tried = main.expand(len(every), -1).clone()
    tried[:, column.place] = every
    seen = [
        received.reshape(len(tried), -1) for name, received in received_ids(model, with_ids(blank, tried)) if name == column.embedding.name
    ]
    if not any(bool((one == every[:, None] + column.offset).all(0).any()) for one in seen):
        return "the model replaces ids before it looks them up"
    own = {other.offset + int(main[0, other.place]) for other in columns if other.embedding.parameter == column.embedding.parameter}
    if not rows_with_slopes(exposure, column.embedding, main) <= own:
        return "another part of the model uses the weight of an embedding, so that rows of absent ids move too"
    return ""
