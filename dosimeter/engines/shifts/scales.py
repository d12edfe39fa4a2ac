"""The factor of each sample's map, from the gradients of the biases around its convolution.

Unmixing gives A_b up to a factor s_b, and the slopes D_b up to 1/s_b. Sums of slopes stand in the update as gradients of biases: the
convolution's own, and that of a norm behind it in eval mode. Carried back through the convolution and the ReLU before it, the slopes
also sum to the bias gradient of the layer in front. Each is a linear system in the 1/s_b with one equation a channel. A system that
does not belong here has no solution, and its residual shows it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dosimeter.engines.shifts.convolutions import ConvolutionLayer
from dosimeter.interfaces import Exposure
from dosimeter.linear_fit import linear_fit
from dosimeter.network.convolving import carry_back

LARGEST_MISFIT = 1e-2  # deviation of the equations that agree, over their right side, up to which a system is taken to belong
LEAST_WITNESSES = 12  # equations that agree beyond as many as there are unknowns
SINGULAR = 1e-12  # over the largest eigenvalue
SILENT = 1e-9  # over the largest: below that a channel is dead, and its equation says nothing
INLIER_DEVIATIONS = 4.0  # an equation agrees within as many
REWEIGHTINGS = 12


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The factors, what told them, and how well it fits."""

    factors: Tensor  # (B,) s_b
    errors: Tensor  # (B,) relative
    source: str  # the parameter whose gradient told them
    misfit: float


def slopes_of(layer: ConvolutionLayer, maps: Tensor) -> Tensor:
    """The slopes behind the layer that belong to maps (B, H·W, in), by least squares over all offsets: (B, H'·W', out)."""
    shifted = shifted_maps(layer, maps)
    gradient = layer.gradient.to(maps).permute(2, 3, 1, 0).flatten(0, 2)  # (k·k·in, out)
    square, right_side = shifted @ shifted.T, shifted @ gradient
    slopes, failed = torch.linalg.solve_ex(square, right_side)
    if bool(failed):  # an output that reads nothing but zeros leaves no trace
        slopes = torch.linalg.pinv(square, rtol=SINGULAR, hermitian=True) @ right_side
    return slopes.reshape(len(maps), layer.reads.outputs, -1)


def shifted_maps(layer: ConvolutionLayer, maps: Tensor) -> Tensor:
    """S_o A for every offset o, beside one another: (B·H'·W', k·k·in). Zero where an output reads outside of the grid."""
    table = torch.tensor(layer.reads.table, device=maps.device)  # (k·k, H'·W')
    outside = maps.new_zeros(len(maps), 1, maps.shape[2])
    read = torch.cat([maps, outside], 1)[:, table]  # (B, k·k, H'·W', in): index −1 is the last row
    return read.transpose(1, 2).flatten(2).flatten(0, 1)


def find_scales(exposure: Exposure, layer: ConvolutionLayer, maps: Tensor, slopes: Tensor) -> Scales | None:
    """The factors that some bias gradient of the update tells; None where none does. A map that can be negative may have one below 0."""
    behind = slopes.sum(1)  # (B, out)
    front = _carried_back(layer, maps, slopes) if layer.non_negative else None  # (B, in)
    best = None
    for name, module in exposure.model.named_modules():
        change = exposure.update.get(f"{name}.bias" if name else "bias")
        if change is None or change.ndim != 1:
            continue
        change = change.to(slopes)
        for sums in (behind, front):
            gain = None if sums is None else _gain(module, sums is behind, name == layer.name)
            if sums is None or gain is None or len(change) != sums.shape[1]:
                continue
            found = _solve(sums, change * gain.to(sums), name, signed=not layer.non_negative)
            if found is not None and (best is None or found.misfit < best.misfit):
                best = found
    return best


def _gain(module: nn.Module, behind: bool, own: bool) -> Tensor | None:
    """The factor a channel between a slope at the module's bias and one at the convolution's output; None where there is none."""
    bias = getattr(module, "bias", None)
    if not isinstance(bias, Tensor):
        return None
    if not behind:
        return torch.ones_like(bias)  # the ReLU's slope itself
    if own:
        return torch.ones_like(bias)
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and not module.training and module.running_var is not None:
        weight = torch.ones_like(bias) if module.weight is None else module.weight
        return (weight / (module.running_var + module.eps).sqrt()).detach()
    return None


def _solve(sums: Tensor, wanted: Tensor, name: str, *, signed: bool = False) -> Scales | None:
    """1/s from Σ_b sums_b / s_b = wanted. A channel with one wrong ReLU slope is far off, so that channels vote."""
    saying = (sums.abs() > SILENT * sums.abs().max()).any(0) | (wanted.abs() > SILENT * wanted.abs().max())  # 0 = 0 agrees with any factor
    sums, wanted = sums[:, saying], wanted[saying]
    channels, samples = len(wanted), len(sums)
    if float(wanted.norm()) == 0 or channels < samples + LEAST_WITNESSES:
        return None
    size = sums.norm(dim=1).clamp_min(torch.finfo(sums.dtype).tiny)  # (B,)
    system = (sums / size[:, None]).T  # (channels, B)
    typical = float(wanted.square().mean().sqrt())
    inverse, weights, deviation = _solve_robustly(system, wanted, torch.finfo(sums.dtype).eps * typical)
    residual = (system @ inverse - wanted).abs()
    agreeing = int((residual < INLIER_DEVIATIONS * deviation).sum())
    if (
        deviation > LARGEST_MISFIT * typical
        or agreeing < max(samples + LEAST_WITNESSES, channels // 2)
        or not (signed or bool((inverse > 0).all()))
    ):
        return None
    covariance = torch.linalg.pinv(system.T @ (weights[:, None] * system))
    spread = deviation * covariance.diagonal().clamp_min(0).sqrt()
    return Scales(
        factors=size / inverse, errors=spread / inverse.abs(), source=f"{name}.bias" if name else "bias", misfit=deviation / typical
    )


def _solve_robustly(system: Tensor, wanted: Tensor, floor: float) -> tuple[Tensor, Tensor, float]:
    """The solution that most equations agree on, their weights, and the deviation of those that agree.

    First least absolute residuals, then Geman & McClure's weights, both by reweighted least squares.
    """
    equations, unknowns = system.shape
    weights = torch.ones_like(wanted)
    solution, deviation = torch.zeros_like(system[0]), 0.0
    for iteration in range(2 * REWEIGHTINGS):
        root = weights.sqrt()
        solution = linear_fit(root[:, None] * system, (root * wanted)[:, None])[:, 0]
        residual = (system @ solution - wanted).abs()
        deviation = max(1.4826 * float(residual.median()) * (equations / (equations - unknowns)) ** 0.5, floor)
        small = residual / deviation
        weights = 1 / small.clamp_min(0.1) if iteration < REWEIGHTINGS else (1 + (small / INLIER_DEVIATIONS) ** 2) ** -2
    return solution, weights, deviation


def _carried_back(layer: ConvolutionLayer, maps: Tensor, slopes: Tensor) -> Tensor:
    """The sum over positions of the slopes in front of the ReLU that made the maps: (B, in)."""
    grid = slopes.transpose(1, 2).reshape(len(slopes), -1, layer.reads.output_height, layer.reads.output_width)
    back = carry_back(layer.module, (maps.shape[2], layer.height, layer.width), grid)
    return (back.flatten(2).transpose(1, 2) * (maps > 0)).sum(1)
