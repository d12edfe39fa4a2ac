"""Whether one sample, followed through two local steps, explains what the neurons that it fires alone changed by."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from dosimeter.client.training import FedAvg
from dosimeter.engines.recursion.own_gradients import LIKELY, OwnGradients, Response
from dosimeter.engines.row_errors import row_errors
from dosimeter.engines.sample_share import unscaled_layers
from dosimeter.interfaces import Exposure

STEPS = 2  # the errors of more steps have no unique fit
ROUNDINGS = 8e-6  # relative, of two steps in single precision; mixtures miss by some 1e-3
NOISE_REACH = 3.0  # standard deviations that the noise in a sum may exceed its own size by
SAME_SLOPE = 1e-4  # relative difference up to which a neuron's slope is its outgoing weights times the next layer's error
OTHER_FACTORS = (0.5, 1.5, 2.0)  # on the first step's error, none of which may fit as well
FITTED_LABELS = 3  # that fit best as if the error did not change


class LocalSteps:
    """Follows a sample x that fires neurons of the first layer alone through two local steps.

    Such a neuron has the input h = ⟨w, x⟩ + b and passes it on with the weights a. The next layer's error ε_t changes b by ⟨a, ε_t⟩, w by
    this times x, and a by h ε_t. So ε_1 and ε_2 determine how the weights of the neuron change. ε_1 is the sample's error at the weights
    that were sent, under one of the labels. ε_2 is fitted. A mixture of samples has another first error than the model gives it, and no
    second error makes up for this in all neurons.
    """

    def __init__(self, exposure: Exposure, own: OwnGradients, weight: str, bias: str) -> None:
        self.exposure, self.own, self.weight, self.bias = exposure, own, weight, bias
        training, size = exposure.public.training, exposure.public.batch_size
        self.following = ""
        if isinstance(training, FedAvg) and _is_followed(training) and size is not None:
            self.rate, self.share = training.learning_rate, 1 / size
            self.following = self._next_layer() if training.local_steps(size) == STEPS else ""

    def explain(self, response: Response, gradient: Tensor) -> bool:
        """Whether one sample with this response at rows of the first layer changes their biases by this gradient (m,)."""
        if not self.following:
            return False
        update, model = self.exposure.update, self.exposure.model
        following = f"{self.following}.weight"
        outgoing = model.get_parameter(following).detach().double().T[response.rows]  # (m, n)
        errors = self.own.errors(response.logits)  # (labels, C)
        next_biases = OwnGradients(self.exposure, [f"{self.following}.bias"])
        starts = errors @ next_biases.respond(response.inputs, torch.arange(outgoing.shape[1])).slopes  # (labels, n) ε_1
        slopes = errors @ response.slopes  # (labels, m)
        if bool(
            (starts @ outgoing.T - slopes).norm() > SAME_SLOPE * slopes.norm()
        ):  # another layer follows, or the activation is not steep
            return False
        neurons = _Neurons(
            outgoing=outgoing,
            fired=model.get_parameter(self.weight).detach().double().flatten(1)[response.rows] @ response.inputs
            + model.get_parameter(self.bias).detach().double()[response.rows],
            slopes=gradient,
            spreads=update[following].double().T[response.rows],
            square=float(response.inputs.square().sum()) + 1,
            rate=self.rate,
            share=self.share,
        )
        return _explains(neurons, starts, ROUNDINGS + neurons.noise(self._noise(self.bias), self._noise(following)))

    def _next_layer(self) -> str:
        """The name of the linear layer that may follow the first, "" where none was sent as it is."""
        neurons, sent = len(self.exposure.update[self.bias]), unscaled_layers(self.exposure.public, self.exposure.update)
        for name, module in self.exposure.model.named_modules():
            if isinstance(module, nn.Linear) and module.in_features == neurons and f"{name}.weight" != self.weight:
                return name if {f"{name}.weight", f"{name}.bias", self.bias} <= sent else ""
        return ""

    def _noise(self, name: str) -> float:
        """The standard deviation of what defenses and the rounding of weights added to an entry."""
        change = self.exposure.update[name]
        norms = row_errors(change, self.exposure.model.get_parameter(name), self.exposure.public).norms
        return float(norms.max()) / math.sqrt(change[0].numel())


def _is_followed(training: FedAvg) -> bool:
    """Whether each step subtracts the gradient of the whole batch times the learning rate."""
    return training.is_plain and training.momentum == 0 and training.proximal == 0 and training.mini_batch is None and not training.frozen


def _explains(neurons: _Neurons, starts: Tensor, tolerance: float) -> bool:
    """Whether one label's first error (labels, n) fits, and errors of other sizes and directions fit too badly to do so by chance."""
    steady = torch.stack([neurons.left(start, start).norm() for start in starts])  # as if the error did not change
    near = starts[steady.argsort()[:FITTED_LABELS]]
    misfits = torch.stack([neurons.misfit(start) for start in near])
    best = near[int(misfits.argmin())]
    if float(misfits.min()) > tolerance:
        return False
    luck = len(starts) * _chance(tolerance, min(float(neurons.misfit(factor * best)) / abs(factor - 1) for factor in OTHER_FACTORS))
    sideways = starts - (starts @ best)[:, None] / best.square().sum() * best
    sideways = sideways[int(sideways.norm(dim=1).argmax())]
    if float(sideways.norm()) > SAME_SLOPE * float(best.norm()):  # with two classes there is no other direction
        luck *= _chance(tolerance, float(neurons.misfit(best + sideways * best.norm() / sideways.norm())))
    return luck <= LIKELY


def _chance(tolerance: float, misfit: float) -> float:
    return min(2 * tolerance / max(misfit, tolerance), 1.0)


@dataclass(frozen=True, kw_only=True)
class _Neurons:
    """Neurons that one sample fires alone, and what they changed by, in a mean over both steps."""

    outgoing: Tensor  # (m, n) a
    fired: Tensor  # (m,) h
    slopes: Tensor  # (m,) of the biases
    spreads: Tensor  # (m, n) of the outgoing weights
    square: float  # |x|² + 1
    rate: float
    share: float  # of one sample in a gradient

    def noise(self, slope: float, spread: float) -> float:
        """The relative size in all changes of noise with these standard deviations."""
        counts = (self.slopes.numel(), slope, self.slopes), (self.spreads.numel(), spread, self.spreads)
        return math.hypot(*((math.sqrt(count) + NOISE_REACH) * size / float(values.norm()) for count, size, values in counts))

    def misfit(self, start: Tensor) -> Tensor:
        """The relative size of what is left if the first error is `start` (n,) and the second one fits best: ()."""
        slope = torch.func.jacfwd(partial(self.left, start))(start)  # of a linear function
        return self.left(start, start - torch.linalg.pinv(slope) @ self.left(start, start)).norm()

    def left(self, *errors: Tensor) -> Tensor:
        """The changes that the errors (n,) of both steps leave unexplained, relative to all changes."""
        outgoing, fired = self.outgoing, self.fired
        slopes, spreads = -self.slopes, -self.spreads
        for error in errors:
            alive = fired > 0
            slope = self.share * alive * (outgoing @ error)
            spread = self.share * (alive * fired)[:, None] * error
            slopes, spreads = slopes + slope / STEPS, spreads + spread / STEPS
            outgoing, fired = outgoing - self.rate * spread, fired - self.rate * self.square * slope
        return torch.cat([slopes / self.slopes.norm(), (spreads / self.spreads.norm()).flatten()])
