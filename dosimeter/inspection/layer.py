"""Linear layers in any form: modules, kernels as large as their input, and parameters that no module applies."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn
from torch.nn.functional import unfold

FEWEST_ROWS = 8  # of a parameter that could show samples
LARGE_KERNEL = 8  # pixels a side: a kernel this large may be meant for inputs of its own size


@dataclass(frozen=True, kw_only=True)
class LinearLayer:
    """A matrix, and the inputs that its rows are multiplied with."""

    name: str
    parameter: str  # the weight's name
    weight: Tensor  # (out, in) in the model's own dtype, on its device
    bias: Tensor | None  # (out,); None where there is none, or where it is unknown which parameter is added
    received: Tensor  # (B, in); the mean over tokens or patches where a sample has several
    applied: bool = True  # by a module, whose calls can be recorded


def linear_layer(name: str, module: nn.Module, received: Tensor, *, proved: bool = False) -> LinearLayer | None:
    """The module as a linear layer: `nn.Linear`, a large kernel, a kernel as large as its input, or a proved head; else None."""
    weight, bias = module.weight, getattr(module, "bias", None)
    assert isinstance(weight, Tensor)
    if isinstance(module, nn.Linear) or proved:
        received = received.flatten(1, -2).mean(1) if received.ndim > 2 else received
    elif isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d) and weight[0].numel() == received[0].numel():
        received = received.flatten(1)
    elif isinstance(module, nn.Conv2d) and module.groups == 1 and LARGE_KERNEL <= max(module.kernel_size) <= min(received.shape[2:]):
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
    """Parameters with a row or a column for each input entry that belong to none of the layers in `applied`."""
    flat = inputs.flatten(1)
    known = {layer.weight.data_ptr() for layer in applied}
    layers = []
    for name, parameter in model.named_parameters():
        rows = None if parameter.data_ptr() in known else rows_of(parameter.detach(), flat.shape[1])
        if rows is not None and len(rows) >= FEWEST_ROWS:
            bias = _bias_beside(model, name, len(rows))
            layers.append(LinearLayer(name=name, parameter=name, weight=rows, bias=bias, received=flat, applied=False))
    return layers


def rows_of(parameter: Tensor, width: int) -> Tensor | None:
    """A parameter as rows (k, width); a matrix may be transposed for that. None where the parameter has no such form."""
    if parameter.ndim < 2:
        return None
    rows = parameter.flatten(1)
    if rows.shape[1] == width:
        return rows
    return parameter.T if parameter.ndim == 2 and len(parameter) == width else None


def _bias_beside(model: nn.Module, weight: str, rows: int) -> Tensor | None:
    """The one vector with `rows` entries in the same module; None where there is none, or more than one."""
    beside = model.get_submodule(weight.rpartition(".")[0]).named_parameters(recurse=False)
    vectors = [p.detach().flatten() for name, p in beside if p.numel() == rows and name != weight.rpartition(".")[2]]
    return vectors[0] if len(vectors) == 1 else None
