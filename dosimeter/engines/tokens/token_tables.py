"""A matrix with a row or a column for each token that no plain embedding holds: bags of embeddings, one-hot inputs, looked-up parameters.

It is found by what texts of our own move: the gradient of such a matrix has the lines of a text's tokens and no others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.client.gradients import eager_gradient, leaves
from dosimeter.client.losses import CrossEntropy, TokenCrossEntropy
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, random_states_restored
from dosimeter.network.token_inputs import TokenEmbedding, main_of, with_ids
from dosimeter.randomness import generator
from dosimeter.types import Refused, Update

TEXTS = 4
MOST_SIZES = 32  # of matrices, the largest first, that are tried as the number of tokens


@dataclass(frozen=True, kw_only=True)
class TokenTable:
    """A matrix whose lines along `axis` belong to one token each."""

    embedding: TokenEmbedding
    axis: int
    doubt: str  # why a line may not be its token's; "" where it is

    def rows(self, change: Tensor) -> Tensor:
        """The update of the matrix with a row for each token: (V, d)."""
        return change if self.axis == 0 else change.T


def find_table(exposure: Exposure) -> TokenTable | None:
    """The matrix whose lines are the tokens', where there is one."""
    matrices = {name: parameter for name, parameter in exposure.model.named_parameters() if parameter.ndim == 2}
    sizes = sorted({side for parameter in matrices.values() for side in parameter.shape}, reverse=True)
    for size in sizes[:MOST_SIZES]:
        rng = generator(0, f"token table {size}")
        length = main_of(exposure.public.blank).shape[1]
        texts = [torch.randint(size, (1, length), generator=rng) for _ in range(TEXTS)]
        moved = [_gradient(exposure, text) for text in texts]
        for name, parameter in matrices.items():
            for axis in (axis for axis in (0, 1) if parameter.shape[axis] == size):
                if all(_lines(update, name, axis) == set(text.flatten().tolist()) for update, text in zip(moved, texts)):
                    weight = parameter.detach() if axis == 0 else parameter.detach().T
                    table = TokenEmbedding(name=name, parameter=name, weight=weight, padding=None)
                    return TokenTable(embedding=table, axis=axis, doubt=_doubt(exposure, name, axis, size, length))
    return None


def _gradient(exposure: Exposure, ids: Tensor) -> Update:
    """The gradient of texts (n, t) of ours, without what the model cannot take."""
    main, positions = main_of(exposure.public.blank), exposure.public.positions
    ids = ids.to(main)
    loss = TokenCrossEntropy() if positions else CrossEntropy()
    targets = torch.zeros_like(ids) if positions else torch.zeros(len(ids), dtype=torch.int64, device=ids.device)
    gradient = eager_gradient(exposure.model, loss, create_graph=False)
    try:
        with random_states_restored():
            return gradient(leaves(exposure.model), copied_buffers(exposure.model), with_ids(exposure.public.blank, ids), targets)
    except (ValueError, TypeError, RuntimeError, IndexError, Refused):  # ids beyond the model's own
        return {}


def _lines(update: Update, name: str, axis: int) -> set[int]:
    if name not in update:
        return set()
    return set(update[name].any(1 - axis).nonzero().flatten().tolist())


def _doubt(exposure: Exposure, name: str, axis: int, size: int, length: int) -> str:
    """All tokens at once move all lines, so that none takes another's."""
    every = torch.arange(-(-size // length) * length).reshape(-1, length) % size
    return "" if len(_lines(_gradient(exposure, every), name, axis)) == size else "the model replaces tokens before it looks them up"
