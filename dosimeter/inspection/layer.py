"""Linear layers by what they do: modules, kernels that cover all that they receive, and parameters that no module applies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import unfold

FEWEST = 8  # rows of a parameter that could show samples
LARGE = 8  # pixels a side of a kernel that may be meant to cover an input of its own size


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """Rows that are multiplied with what a layer receives."""

    name: str
    parameter: str  # the weight's name
    weight: Tensor  # (out, in) in the model's own dtype, on its device
    bias: Tensor | None  # (out,), None also where it is not known which parameter is added
    received: Tensor  # (B, in), the mean over tokens or patches where there are several
    applied: bool = True  # by a module, which a hook can watch


def linear_layer(name: str, module: nn.Module, received: Tensor, *, proved: bool = False) -> LinearLayer | None:
    """The module as a linear layer: `nn.Linear`, a kernel that is large or covers all it receives, what was proved to be one; else None."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    if isinstance(module, nn.Linear) or proved:
        received = received.flatten(1, -2).mean(1) if received.ndim > 2 else received
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and weight[0].numel() == received[0].numel():
        received = received.flatten(1)
    elif isinstance(module, nn.Conv2d) and module.groups == 1 and LARGE <= max(module.kernel_size) <= min(received.shape[2:]):
        received = unfold(received, module.kernel_size, stride=module.kernel_size).mean(2)  # pyright: ignore[reportArgumentType]
    else:
        return None
    return LinearLayer(
        name=name,
        parameter=f"{name}.weight" if name else "weight",
        weight=weight.detach().flatten(1),
        bias=bias.detach() if isinstance(bias, Tensor) else None,
        received=received,
    )


def bare_layers(model: nn.Module, inputs: Tensor, applied: list[LinearLayer]) -> list[LinearLayer]:
    """Parameters with a row, or a column, of as many entries as the input has, other than those of the layers that modules apply."""
    flat = inputs.flatten(1)
    known = {layer.weight.data_ptr() for layer in applied}
    layers = []
    for name, parameter in model.named_parameters():
        rows = None if parameter.data_ptr() in known else rows_of(parameter.detach(), flat.shape[1])
        if rows is not None and len(rows) >= FEWEST:
            bias = _bias_beside(model, name, len(rows))
            layers.append(LinearLayer(name=name, parameter=name, weight=rows, bias=bias, received=flat, applied=False))
    return layers


def rows_of(parameter: Tensor, width: int) -> Tensor | None:
    """A parameter as rows (k, width), of a matrix its columns if need be; None where it has no such form."""
    if parameter.ndim < 2:
        return None
    rows = parameter.flatten(1)
    if rows.shape[1] == width:
        return rows
    return parameter.T if parameter.ndim == 2 and len(parameter) == width else None


def _bias_beside(model: nn.Module, weight: str, rows: int) -> Tensor | None:
    """The one vector of as many entries in the same module; None where there is none, or more than one."""
    beside = model.get_submodule(weight.rpartition(".")[0]).named_parameters(recurse=False)
    vectors = [p.detach().flatten() for name, p in beside if p.numel() == rows and name != weight.rpartition(".")[2]]
    return vectors[0] if len(vectors) == 1 else None
