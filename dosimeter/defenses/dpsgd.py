"""DP-SGD: every sample's gradient clipped, and noise on their sum."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.client.gradients import per_sample_gradients, refuse_batch_norm
from dosimeter.client.training import FedSGD
from dosimeter.defenses.clipping import clip_factor, norm
from dosimeter.defenses.outgoing import ONE_VARIANCE, live_entries, standard_normal, with_noise, working_dtype
from dosimeter.engines.privacy import gaussian_epsilon
from dosimeter.interfaces import Attack, Client, Defense, Loss, Public, Replay, Training
from dosimeter.options import FiniteFloat, OptionError, PositiveFloat
from dosimeter.registry import DEFENSES
from dosimeter.types import Accountant, Accounting, Distortion, Guarantee, ProtectedUnit, Refused, Update

VALUES_AT_ONCE = 2**27  # of per-sample gradients held in memory at one time


@DEFENSES.register("dpsgd")
@dataclass(frozen=True, kw_only=True)
class DPSGD(Defense):
    """Clips every sample's gradient and adds noise to their mean, for a provable (ε, δ).

    Abadi et al., "Deep Learning with Differential Privacy", CCS 2016: Algorithm 1. The update is
    (Σ_i g_i · min(1, max_norm / ‖g_i‖₂) + N(0, (noise_multiplier · max_norm)²)) / B.
    The noise is added before all other defenses of the update, wherever they are listed, so that they only post-process.
    Departure: the sum is divided by the size of this batch, which the server may know. Algorithm 1 divides by the expected size.
    """

    side: ClassVar = "training"
    promise: ClassVar[str] = "(ε, δ) for each sample, against everything the server can do: see `epsilon`"
    breaks: ClassVar[str] = "accuracy at small ε; batch norm in train mode; time and memory for a gradient a sample"
    strengths: ClassVar = ({"max_norm": 1.0, "noise_multiplier": 0.1}, {"max_norm": 1.0, "noise_multiplier": 1.0})

    max_norm: PositiveFloat
    noise_multiplier: FiniteFloat

    def __post_init__(self) -> None:
        super().__post_init__()
        if math.isinf(self.max_norm) and self.noise_multiplier > 0:
            raise OptionError("noise_multiplier", f"expected 0 with an infinite max_norm, got {self.noise_multiplier}; noise needs a bound")

    def distorts(self) -> bool:
        return self.noise_multiplier > 0

    def __call__(self, client: Client, rng: Generator) -> Client:
        if not isinstance(client.training, FedSGD):
            raise Refused(f"dpsgd clips one gradient a sample, so it needs fedsgd training; this client runs {client.training.name}")
        refuse_batch_norm(client.model, self.name)
        training = FedSGD() if math.isinf(self.max_norm) else self.clipped()
        std = self.noise_floor(torch.empty(0), len(client.batch.inputs))
        if std == 0:
            return replace(client, training=training)
        noise = partial(with_noise, draw=standard_normal, rng=rng, size=std, defense=self.name)
        return replace(client, training=training, outgoing=(noise, *client.outgoing))

    def bound(self) -> float:
        """What a sample's gradient is clipped to, or each tensor of it."""
        return self.max_norm

    def multiplier(self) -> float:
        """The noise over the most that one sample moves the sum of the gradients: what ε depends on."""
        return self.noise_multiplier

    def clipped(self) -> ClippedSGD:
        return ClippedSGD(max_norm=self.bound())

    def epsilon(self, *, sample_rate: float, steps: int, delta: float, accountant: Accountant = "rdp") -> float:
        """ε at δ after `steps` rounds, each on a Poisson sample of `sample_rate` of the client's data."""
        return gaussian_epsilon(
            noise_multiplier=self.multiplier(), sample_rate=sample_rate, steps=steps, delta=delta, accountant=accountant
        )

    def guarantee(self, accounting: Accounting, previous: Defense | None) -> Guarantee | None:
        if self.noise_multiplier == 0:
            return None
        source = f"{self.name} by {accounting.accountant}"
        return Guarantee(epsilon=self.epsilon(**vars(accounting)), delta=accounting.delta, unit="sample", source=source)

    def noise_floor(self, change: Tensor, batch_size: int) -> float:
        return self.noise_multiplier * self.bound() / batch_size if self.noise_multiplier else 0.0

    def noise_multiplier_of(self, previous: Defense | None) -> tuple[ProtectedUnit, float] | None:
        return ("sample", self.multiplier()) if self.noise_multiplier else None

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        """Noise, whose size is known only where the batch size is known."""
        size = public.batch_size
        return live_entries(change, noise=0.0 if size is None else self.noise_floor(change, size))

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note=f"the clipping of every sample is replayed with the training; {ONE_VARIANCE}")


@dataclass(frozen=True, kw_only=True)
class ClippedSGD(Training):
    """Sends the mean of the samples' gradients, each first shrunk to a norm of at most `max_norm`: DP-SGD without its noise.

    With `each_tensor`, every tensor of a sample's gradient is shrunk by itself.
    It is deterministic, so that attacks can replay it. The client adds the noise afterwards.
    """

    name: ClassVar[str] = "clipped_sgd"

    max_norm: PositiveFloat
    each_tensor: bool = False

    def __call__(self, model: nn.Module, inputs: Tensor, targets: Tensor, loss: Loss, create_graph: bool = False) -> Update:
        size = max(1, VALUES_AT_ONCE // max(1, sum(p.numel() for p in model.parameters())))
        total: Update = {}
        with torch.set_grad_enabled(create_graph):
            for piece_inputs, piece_targets in zip(inputs.split(size), targets.split(size)):
                gradients = per_sample_gradients(model, piece_inputs, piece_targets, loss)
                rows = [g[..., None].flatten(1) for g in gradients.values()]  # (b, entries); a parameter without dimensions has one
                scales = self._factors(torch.stack([norm(row, dim=1) for row in rows]))  # (tensors, b)
                for scale, (name, g) in zip(scales, gradients.items()):
                    exact = g.to(working_dtype(g))  # half precision would round the scales and the sum past the bound
                    clipped = torch.tensordot(scale.to(exact), exact, dims=1)
                    total[name] = total[name] + clipped if name in total else clipped
        parameters = dict(model.named_parameters())
        return {name: (change / len(inputs)).to(parameters[name].dtype) for name, change in total.items()}

    def sample_term(self, gradient: Update) -> Update:
        if not gradient:
            return {}
        factors = self._factors(torch.stack([norm(change) for change in gradient.values()])[:, None])  # (tensors, 1)
        return {name: change * factor.to(change) for factor, (name, change) in zip(factors, gradient.items())}

    def _factors(self, norms: Tensor) -> Tensor:
        """By what each sample's tensors are multiplied, from their norms (tensors, b), and in the same shape."""
        whole = norms if self.each_tensor else norm(norms, dim=0).expand_as(norms)
        return clip_factor(whole, self.max_norm)
