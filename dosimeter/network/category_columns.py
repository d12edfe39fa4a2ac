"""Columns of ids that have embeddings of their own, as the categories of a table: which rows of which embedding each looks up."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.network.probing import record_arrivals
from dosimeter.network.token_inputs import TokenEmbedding, main_of, with_ids
from dosimeter.randomness import generator

PROBES = 64  # rows of zeros and ones, by which two columns are told apart but for a chance of 2^-64


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column of ids, and the embedding that looks id i up at row i + offset; the columns of one table have an offset each."""

    place: int
    embedding: TokenEmbedding
    offset: int
    size: int  # rows of the embedding from the offset on that are this column's


def find_columns(model: nn.Module, blank: Any) -> list[Column]:
    """The columns whose ids an embedding receives, once for each embedding; in the order of their places."""
    main = main_of(blank)
    ids = torch.randint(2, (PROBES, main.shape[1]), generator=generator(0, "category columns")).to(main)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: set[tuple[int, int, str, str]] = set()
    for name, received in received_ids(model, with_ids(blank, ids)):
        module = model.get_submodule(name)
        assert isinstance(module, nn.Embedding)
        parameter = names.get(id(module.weight))
        if parameter is None or len(received) != PROBES:
            continue
        for part in received.reshape(PROBES, -1).T:
            moved = part[:, None] - ids  # (n, T)
            same = (moved == moved[0]).all(0).nonzero().flatten().tolist()
            found |= {(place, int(moved[0, place]), name, parameter) for place in same}
    columns = []
    for place, offset, name, parameter in sorted(found):
        module = model.get_submodule(name)
        assert isinstance(module, nn.Embedding)
        table = TokenEmbedding(name=name, parameter=parameter, weight=module.weight.detach(), padding=module.padding_idx)
        after = [other for _, other, _, theirs in found if theirs == parameter and other > offset]
        size = min(after, default=table.vocabulary) - offset
        columns.append(Column(place=place, embedding=table, offset=offset, size=size))
    return columns


def received_ids(model: nn.Module, inputs: Any) -> list[tuple[str, Tensor]]:
    """What each embedding receives, by its name."""
    arrivals = record_arrivals(model, inputs, lambda _, module: isinstance(module, nn.Embedding))
    return [(one.name, one.received) for one in arrivals if isinstance(one.received, Tensor)]


def column_sizes(model: nn.Module, blank: Any) -> list[int]:
    """How many ids each column has: of the embeddings that look it up, two where none does."""
    sizes: dict[int, int] = {}
    for column in find_columns(model, blank):
        sizes[column.place] = min(column.size, sizes.get(column.place, column.size))
    return [sizes.get(place, 2) for place in range(main_of(blank).shape[1])]


def random_rows(model: nn.Module, blank: Any, count: int, rng: torch.Generator) -> Tensor:
    """Rows of ids, each drawn from those of its column: (count, T)."""
    drawn = [torch.randint(size, (count,), generator=rng, device=rng.device) for size in column_sizes(model, blank)]
    return torch.stack(drawn, 1)
