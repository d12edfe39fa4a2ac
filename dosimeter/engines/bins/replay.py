"""Would the model have given this input that weight? A sample's δ at an inserted layer, computed for every label."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from dosimeter.client.training import FedAvg, sends_one_gradient
from dosimeter.defenses.secure_aggregation import MeanOfClients
from dosimeter.engines.bins.inserted_layer import STRENGTH, InsertedLayer
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.recursion.levels import snapped
from dosimeter.interfaces import Exposure, Training
from dosimeter.network.probing import copied_buffers

ONE_LABEL = 5e-3  # the more labels there are, the nearer a mixture's weight comes to one of theirs: 1 in 100 by chance
TELLING = 3e-3  # relative difference up to which a label is told by its weight


class Replayer:
    """Computes δ = (STRENGTH / k) · ∂ℓ/∂x̃ · 1 / B of inputs under every label, as the client did for its own samples."""

    def __init__(self, exposure: Exposure, layer: InsertedLayer, labels: Tensor | None = None) -> None:
        public = exposure.public
        assert public.batch_size is not None
        self.layer, self.loss, self.shape = copy.deepcopy(layer), public.loss, public.input_shape
        self.normalization = public.normalization
        self.labels = torch.arange(public.classes) if labels is None else labels  # those that a sample may have
        self.exact = ONE_LABEL / len(self.labels)  # relative difference up to which a weight confirms a sample
        self.factor = STRENGTH / sum(layer.bins) / public.batch_size

    def __call__(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """How far the weight is from the one that the best label gives the input, relative: (n,)."""
        return self.mismatch(inputs, weights).amin(1)

    def labels_of(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """The label that fits each sample's weight best, −1 where none does: (n,)."""
        difference, best = self.mismatch(inputs, weights).min(1)
        labels = self.labels.to(best.device)[best]
        return torch.where(difference <= TELLING, labels, -1)

    def mismatch(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Relative difference between each label's weight and the one seen: (n, labels)."""
        like = self.layer.rows.weight
        samples = snapped(inputs.reshape(-1, *self.shape), self.normalization).to(like)  # ties must fall as the client's did
        reached = [self._reached(piece) for piece in samples.split(64)]
        logits, slopes = (torch.cat(parts).double() for parts in zip(*reached))  # (n, C)
        ids = torch.ones(len(samples), dtype=torch.int64, device=logits.device)
        columns = [(self.loss.logit_gradient(logits, int(label) * ids) * slopes).sum(1) for label in self.labels]
        expected = self.factor * torch.stack(columns, 1)
        return (expected - weights[:, None]).abs() / weights[:, None].abs()

    @torch.no_grad()
    def _reached(self, samples: Tensor) -> tuple[Tensor, ...]:
        """The logits of samples (n, *shape), and their derivatives along the added constant: (n, C) each."""
        buffers = copied_buffers(self.layer.body)
        shifted = self.layer.shifted(samples)
        with twice_differentiable():  # derivatives along a direction need the plain forms too
            return torch.func.jvp(
                lambda moved: torch.func.functional_call(self.layer.body, buffers, (moved,)), (shifted,), (torch.ones_like(shifted),)
            )

    def possible(self) -> bool:
        """Whether the model can be differentiated along a direction at all."""
        try:
            self._reached(self.layer.rows.weight.new_zeros(2, *self.shape))
        except (RuntimeError, NotImplementedError):
            return False
        return True


def replayer_for(exposure: Exposure, layer: InsertedLayer, labels: Tensor | None = None) -> Replayer | None:
    """A replayer where a sample's weight depends on itself alone: one gradient step, no batch statistics, nothing random.

    None too where the model cannot be differentiated along a direction.
    """
    public = exposure.public
    if public.batch_size is None or not one_gradient(public.training) or _mixes_samples(layer.body):
        return None
    replayer = Replayer(exposure, layer, labels)
    return replayer if replayer.possible() else None


def one_gradient(training: Training) -> bool:
    """Whether the update is the gradient at the model as it was sent, of one client or of several together."""
    return sends_one_gradient(of_one_client(training))


def takes_local_steps(training: Training) -> bool:
    """Whether the model moves while the client trains."""
    return isinstance(of_one_client(training), FedAvg) and not one_gradient(training)


def of_one_client(training: Training) -> Training:
    return training.each if isinstance(training, MeanOfClients) else training


def _mixes_samples(model: nn.Module) -> bool:
    normed = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return any(isinstance(module, normed) and module.training for module in model.modules())
