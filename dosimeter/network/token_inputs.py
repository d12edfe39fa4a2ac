"""Token inputs: what a model takes in place of numbers, and the embedding that it looks them up in."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.network.probing import output_of, record_calls
from dosimeter.types import ID_TYPES, Batch, NamedInputs, Refused


@dataclass(frozen=True, kw_only=True)
class TokenEmbedding:
    """The layer that turns token ids into vectors."""

    name: str  # of the module
    parameter: str  # of its weight in an update
    weight: Tensor  # (V, H)
    padding: int | None  # the id whose row is not trained

    @property
    def vocabulary(self) -> int:
        return len(self.weight)


def are_tokens(inputs: Any) -> bool:
    """Whether samples are rows of token ids: (B, T) integers."""
    main = inputs.main if isinstance(inputs, NamedInputs) else inputs
    return main.dtype in ID_TYPES and main.ndim == 2


def main_of(inputs: Any) -> Tensor:
    """The tensor that the samples are read from."""
    return inputs.main if isinstance(inputs, NamedInputs) else inputs


def tensors_of(inputs: Any) -> list[Tensor]:
    """All tensors of some inputs."""
    return list(inputs.tensors.values()) if isinstance(inputs, NamedInputs) else [inputs]


def texts_of_batch(batch: Batch) -> list[tuple[int, ...]]:
    """The texts of a batch of token ids, without positions that its attention mask hides."""
    inputs = batch.inputs
    if not isinstance(inputs, NamedInputs):
        return [tuple(row) for row in inputs.tolist()]
    mask = inputs.tensors.get("attention_mask", torch.ones_like(inputs.main))
    return [tuple(row[shown].tolist()) for row, shown in zip(inputs.main, mask.bool())]


def blank_of(inputs: Any) -> Any:
    """One sample of the same shape without its content, as the model takes it: ids of 0 that no mask hides."""
    if isinstance(inputs, NamedInputs):
        return NamedInputs({name: _blank(tensor, "mask" in name) for name, tensor in inputs.tensors.items()})
    return _blank(inputs, False)


def _blank(tensor: Tensor, shown: bool) -> Tensor:
    return torch.full_like(tensor[:1], 1 if shown else 0)


def blank_for(model: nn.Module, shape: tuple[int, ...]) -> Tensor | None:
    """A row of token ids where the model takes tokens, which it shows by having an embedding and not running on numbers; else None."""
    if len(shape) != 1 or not any(isinstance(module, nn.Embedding) for module in model.modules()):
        return None
    like = next(model.parameters())
    with torch.random.fork_rng([like.device] if like.is_cuda else []):
        try:
            output_of(model, torch.zeros(2, *shape).to(like))
        except Exception:  # a model may fail in any way on what it does not take
            return torch.zeros(1, *shape, dtype=torch.int64, device=like.device)
    return None


def with_ids(blank: Any, ids: Tensor) -> Any:
    """What the model takes for these ids (n, t), t up to the length of the blank sample; whatever else it takes is the blank sample's."""
    if not isinstance(blank, NamedInputs):
        return ids
    length = blank.shape[1]
    others = {
        name: (tensor[:, : ids.shape[1]] if tensor.ndim > 1 and tensor.shape[1] == length else tensor).expand(
            len(ids), *([-1] * (tensor.ndim - 1))
        )
        for name, tensor in blank.tensors.items()
    }
    main = next(name for name, tensor in blank.tensors.items() if tensor is blank.main)
    return NamedInputs(others | {main: ids})


def find_token_embedding(model: nn.Module, blank: Any) -> TokenEmbedding:
    """The embedding that receives the ids themselves; a refusal where there is none."""
    main = blank.main if isinstance(blank, NamedInputs) else blank
    ids = torch.arange(main.shape[1], device=main.device, dtype=main.dtype).flip(0)[None] % _smallest_vocabulary(model)
    calls = record_calls(model, with_ids(blank, ids), lambda _, module: isinstance(module, nn.Embedding), evaluate=True)[1]
    seen = [call for call in calls if isinstance(call.received, Tensor) and torch.equal(call.received.flatten(), ids.flatten())]
    if not seen:
        raise Refused("the model has no embedding (torch.nn.Embedding) that receives all token ids")
    module = seen[0].module
    assert isinstance(module, nn.Embedding)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return TokenEmbedding(name=seen[0].name, parameter=names[id(module.weight)], weight=module.weight.detach(), padding=module.padding_idx)


def _smallest_vocabulary(model: nn.Module) -> int:
    """Ids below this number can be looked up in every embedding with more than one row."""
    sizes = [module.num_embeddings for module in model.modules() if isinstance(module, nn.Embedding)]
    return max(2, min((size for size in sizes if size > 1), default=2))
