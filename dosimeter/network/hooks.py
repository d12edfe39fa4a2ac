"""Hooks that a user left on a model: a copy goes without them wherever it computes the same."""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dosimeter.network.copies import deep_copy
from dosimeter.network.probing import copied_buffers, forward

COMPUTING_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")  # may change what a model computes
STORING_HOOKS = ("_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
TRUSTED_PACKAGES = ("torch", "dosimeter")  # weight norm, spectral norm and pruning are hooks of torch, some defenses hooks of ours


class Place(NamedTuple):
    """Where a hook stands in a model and in every copy of it."""

    module: str
    kind: str
    key: int


def without_user_hooks(model: nn.Module, inputs: Tensor) -> tuple[nn.Module, list[str]]:
    """The model without the hooks of the user's own code, and the names of the modules that keep one.

    A hook stays where the output or the gradient on `inputs` changes without it. The given model is not changed.
    """
    hooks = _user_hooks(model, COMPUTING_HOOKS)
    storing = _user_hooks(model, STORING_HOOKS)
    if not hooks and not storing:
        return model, []
    bare = _without(model, [*hooks, *storing])
    if not hooks or _agree(bare, model, inputs):
        return bare, []
    lean, needed = _without(model, storing), []
    for hook in hooks:
        shorn = _without(lean, [hook])
        if _agree(shorn, model, inputs):
            lean = shorn
        else:
            needed.append(hook.module or type(model).__name__)
    return lean, list(dict.fromkeys(needed))


def _user_hooks(model: nn.Module, kinds: tuple[str, ...]) -> list[Place]:
    return [
        Place(name, kind, key)
        for name, module in model.named_modules()
        for kind in kinds
        for key, hook in getattr(module, kind).items()
        if not _is_trusted(hook)
    ]


def _is_trusted(hook: Any) -> bool:
    """Whether a hook is code of a trusted package: a function of the package, or an object of one of its classes."""
    while isinstance(hook, partial):
        hook = hook.func
    owner = getattr(hook, "__self__", None)
    module = type(owner).__module__ if owner is not None else getattr(hook, "__module__", None) or type(hook).__module__
    return module.partition(".")[0] in TRUSTED_PACKAGES


def _without(model: nn.Module, hooks: list[Place]) -> nn.Module:
    """A copy without these hooks."""
    twin = deep_copy(model)
    for hook in hooks:
        module = twin.get_submodule(hook.module)
        del getattr(module, hook.kind)[hook.key]
        for beside in ("_with_kwargs", "_always_called"):
            getattr(module, hook.kind + beside, {}).pop(hook.key, None)
    return twin


def _agree(one: nn.Module, other: nn.Module, inputs: Tensor) -> bool:
    """Whether two models have the same output and the same gradient to the last bit; not where a pass fails."""
    try:
        return all(torch.equal(a, b) for a, b in zip(_computed(one, inputs), _computed(other, inputs), strict=True))
    except Exception:  # a hook may raise anything
        return False


def _computed(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """The model's output, and the gradient of a fixed combination of its entries."""
    leaves = {name: parameter.detach().requires_grad_() for name, parameter in model.named_parameters()}
    with torch.random.fork_rng([inputs.device] if inputs.is_cuda else []), torch.enable_grad():
        torch.manual_seed(0)  # a model with dropout must draw the same mask each time
        output = forward(deep_copy(model), (leaves, copied_buffers(model)), inputs)
        slopes = torch.linspace(-1, 1, output.numel(), dtype=output.dtype, device=output.device).view_as(output)
        gradient = torch.autograd.grad(output, list(leaves.values()), slopes, allow_unused=True, materialize_grads=True)
    return [output.detach(), *gradient]
