"""Deep copies of a model."""

from __future__ import annotations

import copy

from torch import Tensor, nn

from dosimeter.options import first_line


def deep_copy(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model. A tensor that a pass left as an attribute, as pruning's weight, is copied by value."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
    left = [value for module in model.modules() for value in vars(module).values() if isinstance(value, Tensor) and not value.is_leaf]
    try:
        return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in left})
    except Exception as error:  # a module may copy itself in its own way, or hold what cannot be copied
        raise ValueError(f"model: cannot be copied: {first_line(error)}") from error
