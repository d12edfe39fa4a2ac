"""A model over texts as a model over vectors: what the token embedding would give is guessed as numbers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import normalize

from dosimeter.interfaces import Exposure
from dosimeter.network.copies import deep_copy
from dosimeter.network.token_inputs import TokenEmbedding, find_token_embedding, with_ids
from dosimeter.types import NamedInputs, Refused

PREFIX = "model."  # of the parameters' names, once the model is inside of another


class GivenVectors(nn.Module):
    """Stands in the place of an embedding, and gives the vectors that it was handed."""

    def __init__(self) -> None:
        super().__init__()
        self.vectors: Tensor | None = None

    def forward(self, ids: Tensor) -> Tensor:
        assert self.vectors is not None
        return self.vectors


class OverVectors(nn.Module):
    """A model over texts that takes the vectors of its tokens: (B, T, H)."""

    def __init__(self, model: nn.Module, embedding: str, blank: Any) -> None:
        super().__init__()
        self.model, self.blank = deep_copy(model), blank
        self.given = GivenVectors()
        parent, _, own = embedding.rpartition(".")
        setattr(self.model.get_submodule(parent), own, self.given)
        self.train(model.training)

    def forward(self, vectors: Tensor) -> Any:
        ids = torch.zeros(vectors.shape[:2], dtype=torch.int64, device=vectors.device)
        own = with_ids(self.blank, ids)
        self.given.vectors = vectors
        try:
            return self.model(**own.tensors) if isinstance(own, NamedInputs) and not own.by_place else self.model(own)
        finally:
            self.given.vectors = None  # a tensor left behind would keep its graph alive


@dataclass(frozen=True, kw_only=True)
class Embedded:
    """An exposure whose inputs are the vectors of a text's tokens, and the embedding that they are looked up in."""

    exposure: Exposure
    embedding: TokenEmbedding

    @property
    def unit(self) -> float:
        """The root mean square of the embedding's entries, in which steps and starts are measured."""
        return float(self.embedding.weight.double().square().mean().sqrt())

    def vectors_of(self, ids: Tensor) -> Tensor:
        """(B, T) token ids -> (B, T, H)"""
        return self.embedding.weight[ids]

    def nearest(self, vectors: Tensor, allowed: Tensor | None = None) -> Tensor:
        """The tokens whose vectors point where these (B, T, H) do, out of those `allowed` (V,) bool: (B, T)."""
        likeness = normalize(vectors, dim=-1) @ normalize(self.embedding.weight, dim=-1).T
        return (likeness if allowed is None else likeness.masked_fill(~allowed, -torch.inf)).argmax(-1)


def over_vectors(exposure: Exposure, method: str) -> Embedded:
    """The exposure with vectors in place of token ids. The embedding's own gradient is left out: guessed vectors give it none."""
    public = exposure.public
    if public.positions:
        raise Refused(
            f"{method} guesses vectors under known labels, and the targets of this model are tokens themselves, one at each position; "
            "dager reads texts here"
        )
    embedding = find_token_embedding(exposure.model, public.blank)
    model = OverVectors(exposure.model, embedding.name, public.blank)
    held = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    update = {PREFIX + name: change for name, change in exposure.update.items() if PREFIX + name in held}
    if not update:
        raise Refused(f"{method} matches the gradients behind the embedding, and the client sends none of them")
    shape = (public.input_shape[0], embedding.weight.shape[1])
    public = replace(public, input_shape=shape, blank=None)
    return Embedded(exposure=replace(exposure, model=model, update=update, public=public, auxiliary=None, buffers={}), embedding=embedding)
