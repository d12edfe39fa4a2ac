"""The server's copy of a model: what the user's own code keeps of the private batch does not come along."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.hooks import without_user_hooks
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import forward, output_of
from dosimeter.network.reach import Reach
from dosimeter.network.token_inputs import are_tokens, blank_of
from dosimeter.randomness import generator
from dosimeter.types import Batch, NamedInputs

NOISE_SAMPLES = 2  # that go through the copy; batch norm in train mode takes no single one
ALIKE = 0.999  # correlation from which two rows of numbers count as the same, up to scale and shift
SHORTEST = 8  # numbers in a row that is compared: fewer agree by coincidence
CONSTANT = 1e-5  # root mean square deviation, relative to the largest number, up to which a row is constant
AT_ONCE = 2**22  # numbers of a kept tensor that are compared at once


def server_copy(model: nn.Module, batch: Batch) -> nn.Module:
    """A copy of the model, made before the client trains, without the user's hooks.

    A hook that the model computes with stays, and a warning says so. A model that keeps what it sees has seen noise last. A copy that
    reaches a private sample all the same, or what the model makes of one, is refused: in attributes, buffers, classes, closures,
    or globals that its code mentions.
    """
    noise = _noise(batch.inputs, NOISE_SAMPLES)
    with nothing_kept(model):
        copied, needed = without_user_hooks(copy_of(model), noise)
    for name in needed:
        warnings.warn(
            f"model: the hook on {name!r} changes what the model computes, so the server's copy keeps it; "
            "an attack can read what the hook stores outside the model and its code",
            stacklevel=3,
        )
    if any(array.numel() >= SHORTEST for _, array in Reach(copied).arrays().values()):
        with nothing_kept(model):
            _pass(copied, noise)  # what was seen last is now noise
        _refuse_samples(copied, batch.inputs)
    return copied


def _refuse_samples(model: nn.Module, inputs: Any) -> None:
    """Refuse a model that reaches a sample (B, *shape), or numbers that a pass over the samples leaves and a pass over noise does not."""
    samples = _forms(inputs.main if isinstance(inputs, NamedInputs) else inputs, len(inputs))
    made = [row for array in _written(model, inputs) for row in _forms(array, len(inputs))]
    usual = [row for array in _written(model, _noise(inputs, len(inputs))) for row in _forms(array, len(inputs))]
    for name, array in Reach(model).arrays().values():
        if _shows(array, samples):
            raise ValueError(f"model: {name!r} holds samples of the private batch, which the server would see; clear it first")
        if _shows(array, made) and not _shows(array, usual):
            raise ValueError(
                f"model: {name!r} holds what the model made of the private batch, which the server would see; clear it, or hand over a "
                "model that has not seen this batch"
            )


def _noise(inputs: Any, samples: int) -> Any:
    """Samples without content, as the model takes them: noise, or blank texts."""
    if are_tokens(inputs):
        return blank_of(inputs)[[0] * samples]
    stream = generator(0, "noise for the server's copy")
    if isinstance(inputs, NamedInputs):
        return inputs.each(lambda tensor: torch.rand((samples, *tensor.shape[1:]), generator=stream).to(tensor))
    return torch.rand((samples, *inputs.shape[1:]), generator=stream).to(inputs)


def _pass(model: nn.Module, inputs: Any, *, write_buffers: bool = False) -> None:
    with torch.random.fork_rng([inputs.device] if inputs.device.type == "cuda" else []), torch.no_grad():
        forward(model, {}, inputs) if write_buffers else output_of(model, inputs)


def _written(model: nn.Module, inputs: Any) -> list[Tensor]:
    """What a pass over `inputs` writes anywhere within reach; nothing where the pass fails, since then the training says why."""
    twin = deep_copy(model)
    with nothing_kept(model):
        reach = Reach(twin)
        before = {key: array.detach().clone() for key, (_, array) in reach.arrays().items()}
        try:
            _pass(twin, inputs, write_buffers=True)
        except RuntimeError:
            return []
        after = {key: array.detach().clone() for key, (_, array) in Reach(twin).arrays().items()}
    return [array for key, array in after.items() if key not in before or not torch.equal(array, before[key])]


def _forms(array: Tensor, samples: int) -> list[Tensor]:
    """A tensor as one row; and as one row a sample, where its first side is the samples'."""
    rows = [_rows(array, array.numel())]
    if array.ndim > 1 and len(array) == samples:
        rows.append(_rows(array, array[0].numel()))
    return [row for row in rows if len(row)]


def _rows(array: Tensor, length: int) -> Tensor:
    """A tensor's numbers in rows of this length, each with mean zero and length one, without constant rows: (n, length)."""
    if length < SHORTEST or array.numel() % length:
        return torch.empty(0, length)
    rows = torch.nan_to_num(array.detach().reshape(-1, length).float())
    rows = rows - rows.mean(1, keepdim=True)
    norms = rows.norm(dim=1, keepdim=True)
    varied = norms[:, 0] > CONSTANT * length**0.5 * array.abs().max()
    return rows[varied] / norms[varied]


def _shows(array: Tensor, wanted: list[Tensor]) -> bool:
    """Whether some row of a tensor equals a wanted one up to scale and shift."""
    for rows in wanted:
        own = _rows(array, rows.shape[1])
        if len(own) and any(
            bool(((piece @ rows.T.to(piece)).abs() > ALIKE).any()) for piece in own.split(max(1, AT_ONCE // rows.shape[1]))
        ):
            return True
    return False
