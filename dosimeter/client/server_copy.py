"""The server's copy of a model: what the user's own code keeps of the private batch does not come along."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.network.head import copy_of
from dosimeter.network.hooks import without_user_hooks
from dosimeter.network.probing import output_of
from dosimeter.randomness import generator
from dosimeter.types import Batch

NOISE_SAMPLES = 2  # that go through the copy; batch norm in train mode takes no single one


def server_copy(model: nn.Module, batch: Batch) -> nn.Module:
    """A copy of the model, made before the client trains, without the user's hooks.

    A hook that the model computes with stays, and a warning says so. A model that keeps what it sees has seen noise last. A copy that
    holds a private sample all the same is refused.
    """
    shape = (NOISE_SAMPLES, *batch.inputs.shape[1:])
    noise = torch.rand(shape, generator=generator(0, "noise for the server's copy")).to(batch.inputs)
    copied, needed = without_user_hooks(copy_of(model), noise)
    for name in needed:
        warnings.warn(
            f"model: the hook on {name!r} changes what the model computes, so the server's copy keeps it; "
            "if it stores what it sees, an attack can read the private batch there",
            stacklevel=3,
        )
    if any(True for _ in _kept_tensors(copied)):
        with torch.random.fork_rng([noise.device] if noise.is_cuda else []):
            output_of(copied, noise)  # what was seen last is now noise
    for name, tensor in _kept_tensors(copied):
        if _holds_sample(tensor, batch.inputs):
            raise ValueError(f"model: {name!r} holds samples of the private batch, which the server would see; clear it first")
    return copied


def _kept_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module holds beside its parameters and buffers, with the attribute's name."""
    for prefix, module in model.named_modules():
        for attribute, value in vars(module).items():
            if attribute not in ("_parameters", "_buffers", "_modules"):
                yield from ((f"{prefix}.{attribute}".lstrip("."), tensor) for tensor in _tensors_in(value))


def _tensors_in(value: Any, depth: int = 3) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif depth and isinstance(value, (list, tuple, set, Mapping)):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(item, depth - 1)


def _holds_sample(tensor: Tensor, inputs: Tensor) -> bool:
    """Whether a tensor consists of rows as long as a sample (B, *shape) and one of them is a private sample."""
    samples = inputs.flatten(1)
    if tensor.numel() == 0 or tensor.numel() % samples.shape[1]:
        return False
    rows = tensor.detach().reshape(-1, samples.shape[1]).to(samples)
    return any(bool((rows == sample).all(1).any()) for sample in samples)
