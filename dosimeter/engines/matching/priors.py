"""What a guess should look like apart from its gradient: priors on images and on what the network makes of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from dosimeter.types import Refused

Seen = Mapping[str, Tensor]  # by module name: what the module received in the forward pass
Statistics = tuple[Tensor, Tensor, Tensor]  # of a batch norm, (C,) each: running mean, running variance, what it divides by


@dataclass(frozen=True, kw_only=True)
class Prior(ABC):
    """A penalty on one guessed batch, switched on after `onset` (a fraction of the steps)."""

    weight: float
    onset: float = 0.0

    @abstractmethod
    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        """(B, *shape) and what the watched modules received -> a scalar."""

    def modules_to_watch(self, model: nn.Module) -> tuple[str, ...]:
        """The modules whose inputs the prior looks at."""
        return ()

    def weight_at(self, progress: float) -> float:
        """The weight after a fraction `progress` of the steps."""
        return self.weight if progress >= self.onset else 0.0


@dataclass(frozen=True, kw_only=True)
class TotalVariation(Prior):
    """Neighbouring pixels are alike: the mean absolute difference in each direction, or its isotropic form.

    "l1" is the form of Geiping et al.'s code; "isotropic" is Σ ((Δx)² + (Δy)²)^(power/2), hfginv Eq. (11), as a mean. With `summed`
    it is the sum over the whole batch, as the equation prints it. Inputs without two spatial directions have no neighbours and pay
    nothing.
    """

    form: Literal["l1", "isotropic"] = "l1"
    power: float = 1.0
    summed: bool = False

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        if inputs.ndim < 4:
            return inputs.new_zeros(())
        down = inputs[..., 1:, :] - inputs[..., :-1, :]
        right = inputs[..., :, 1:] - inputs[..., :, :-1]
        gather = torch.sum if self.summed else torch.mean
        if self.form == "l1":
            return gather(down.abs()) + gather(right.abs())
        squared = down[..., :, :-1].square() + right[..., :-1, :].square()
        if self.power == 2:
            return gather(squared)
        return gather((squared + torch.finfo(inputs.dtype).eps).pow(self.power / 2))


@dataclass(frozen=True, kw_only=True)
class SquaredNorm(Prior):
    """Inputs stay small: the mean square (GradInversion's ℓ2 term, Yin et al., CVPR 2021, Eq. 9)."""

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        return inputs.square().mean()


@dataclass(frozen=True, kw_only=True)
class VectorLength(Prior):
    """Vectors (B, T, H) are as long on average as those of known tokens: (mean ‖x‖ − length)² (Balunović et al., NeurIPS 2022)."""

    length: float

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        return (inputs.norm(dim=-1).mean() - self.length).square()


@dataclass(frozen=True, kw_only=True)
class BatchNormStatistics(Prior):
    """The batch's mean and variance at every batch norm are those of the training data.

    Σ_l w_l (‖μ_l(x) − μ̄_l‖₂ + ‖σ²_l(x) − σ̄²_l‖₂): Yin et al., CVPR 2020 and 2021; hfginv Eq. (11). `leading` are the
    weights of the first layers, which released code of both raises; the others weigh 1. Departure: both differences are taken in the
    units in which the norm hands its maps on, s_l = √(σ̄²_l + ε) and s_l². In the maps' own units a weight serves one network only: a
    network that takes pixels up to 255 has a thousand times larger maps behind its stem than one that takes normalised ones, and the
    prior then drowns the match. `scaled=False` takes the maps' own units, as printed.
    """

    statistics: Mapping[str, Statistics]  # by module name
    leading: tuple[float, ...] = ()
    unbiased: frozenset[str] = frozenset()  # modules whose variance is a batch's as batch norm keeps it, divided by n − 1
    scaled: bool = True

    def __call__(self, inputs: Tensor, seen: Seen) -> Tensor:
        total = inputs.new_zeros(())
        factors = (*self.leading, *[1.0] * len(self.statistics))
        for factor, (name, (mean, variance, unit)) in zip(factors, self.statistics.items()):
            received, unit = seen[name], unit if self.scaled else torch.ones_like(unit)
            spread, centre = torch.var_mean(received, dim=[0, *range(2, received.ndim)], correction=int(name in self.unbiased))
            term = torch.linalg.vector_norm((centre - mean) / unit) + torch.linalg.vector_norm((spread - variance) / unit**2)
            total = total + factor * term
        return total

    def modules_to_watch(self, model: nn.Module) -> tuple[str, ...]:
        return tuple(self.statistics)


def batch_norm_prior(
    model: nn.Module,
    *,
    weight: float,
    onset: float = 0.0,
    leading: tuple[float, ...] = (),
    buffers: Mapping[str, Tensor] | None = None,
    scaled: bool = True,
) -> BatchNormStatistics:
    """The prior on a model's own running statistics; refused where it keeps none.

    Where the client sent its `buffers` after training, the statistics are those of the client's batches: see `statistics_of_batches`.
    """
    statistics = batch_norms(model)
    if not statistics:
        raise Refused("the batch-norm prior needs batch-norm layers with running statistics: the model has none; set batch_norm=0")
    told = statistics_of_batches(model, buffers or {})
    known = statistics | told
    return BatchNormStatistics(weight=weight, onset=onset, statistics=known, leading=leading, unbiased=frozenset(told), scaled=scaled)


def statistics_of_batches(model: nn.Module, buffers: Mapping[str, Tensor]) -> dict[str, Statistics]:
    """The mean statistics of the client's own batches, by module name, from running statistics and counters after its training.

    With momentum m, batch norm writes r ← (1 − m) r + m s at every step. After n steps r' = (1 − m)ⁿ r + (1 − (1 − m)ⁿ) s̄ with s̄
    a weighted mean of the batches' statistics, of one step the batch's own. Without a momentum, r is the mean of all batches counted.
    """
    found = {}
    for name, (mean, variance, _) in batch_norms(model).items():
        module = model.get_submodule(name)
        assert isinstance(module, nn.modules.batchnorm._BatchNorm)
        names = ("running_mean", "running_var", "num_batches_tracked")
        sent = [buffers[key] for which in names if (key := f"{name}.{which}" if name else which) in buffers]
        if not module.training or len(sent) < len(names) or module.num_batches_tracked is None:
            continue
        counted = int(module.num_batches_tracked)
        steps = int(sent[2]) - counted
        kept = counted / int(sent[2]) if module.momentum is None else (1 - module.momentum) ** steps
        if steps < 1 or kept == 1:
            continue
        told = [(new.to(old) - kept * old) / (1 - kept) for new, old in zip(sent, (mean, variance))]
        found[name] = (told[0], told[1].clamp_min(0), (told[1].clamp_min(0) + module.eps).sqrt())
    return found


def batch_norms(model: nn.Module) -> dict[str, Statistics]:
    """The running statistics of every batch norm that keeps them, by module name, in single precision at least."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is not None and module.running_var is not None:
            dtype = torch.promote_types(module.running_var.dtype, torch.float32)
            mean, variance = (buffer.detach().to(dtype, copy=True) for buffer in (module.running_mean, module.running_var))
            found[name] = (mean, variance, (variance + module.eps).sqrt())
    return found
