"""The weight δ that a model gives an input at an inserted layer, computed for every label as the client computes it."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from dosimeter.engines.bins.inserted_layer import LAYER_NAMES, LAYER_STRENGTH, InsertedLayer
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.recursion.levels import snap_to_levels
from dosimeter.engines.sample_share import mixes_samples, share_of_one_sample
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, forward

CHANCE_TOLERANCE = 5e-3  # over the number of labels: within more, mixtures pass by chance
SURE_TOLERANCE = 1e-4  # likewise, where nothing else confirms a sample
LEAST_TOLERANCE = 3e-6  # the model's own rounding
LABEL_TOLERANCE = 3e-3  # relative difference of weights up to which a label is named


class Replayer:
    """Computes δ = (strength / k) · ∂ℓ/∂x̃ · 1 / B of inputs under every label, as the client does for its own samples."""

    def __init__(self, exposure: Exposure, layer: InsertedLayer, labels: Tensor | None = None) -> None:
        public = exposure.public
        assert public.batch_size is not None
        self.layer, self.loss, self.shape = copy.deepcopy(layer), public.loss, public.input_shape
        self.normalization = public.normalization
        self.labels = torch.arange(public.classes) if labels is None else labels  # that a sample may have
        # relative differences of weights: less is rounding, and more confirms no sample
        self.least, self.exact, self.surest = LEAST_TOLERANCE, CHANCE_TOLERANCE / len(self.labels), SURE_TOLERANCE / len(self.labels)
        self.factor = LAYER_STRENGTH / sum(layer.bins) / public.batch_size

    def __call__(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Relative difference between each weight and the nearest that any label gives the input: (n,)."""
        return self.mismatch(inputs, weights).amin(1)

    def find_labels(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """The label that fits each sample's weight best, −1 where none does: (n,)."""
        difference, best = self.mismatch(inputs, weights).min(1)
        labels = self.labels.to(best.device)[best]
        return torch.where(difference <= LABEL_TOLERANCE, labels, -1)

    def mismatch(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """How far the weight that each label predicts is from the observed one, relative to it: (n, labels)."""
        like = self.layer.rows.weight
        samples = snap_to_levels(inputs.reshape(-1, *self.shape), self.normalization).to(
            like
        )  # exactly on the levels: kinks must fall as they did for the client
        reached = [self._logits_and_slopes(piece) for piece in samples.split(64)]
        logits, slopes = (torch.cat(parts).double() for parts in zip(*reached))  # (n, C)
        ids = torch.ones(len(samples), dtype=torch.int64, device=logits.device)
        columns = [(self.loss.logit_gradient(logits, int(label) * ids) * slopes).sum(1) for label in self.labels]
        expected = self.factor * torch.stack(columns, 1)
        return (expected - weights[:, None]).abs() / weights[:, None].abs()

    @torch.no_grad()
    def _logits_and_slopes(self, samples: Tensor) -> tuple[Tensor, ...]:
        """The logits of samples (n, *shape), and their derivatives along the added constant: (n, C) each."""
        buffers = copied_buffers(self.layer.body)
        shifted = self.layer.shift(samples)
        with twice_differentiable():  # forward-mode derivatives need the same plain layers
            return torch.func.jvp(lambda moved: forward(self.layer.body, buffers, moved), (shifted,), (torch.ones_like(shifted),))

    def is_possible(self) -> bool:
        """Whether forward-mode derivatives of the model exist."""
        try:
            self._logits_and_slopes(self.layer.rows.weight.new_zeros(2, *self.shape))
        except (RuntimeError, NotImplementedError):
            return False
        return True


def replayer_for(exposure: Exposure, layer: InsertedLayer, labels: Tensor | None = None) -> Replayer | None:
    """A replayer, if each sample's weight depends on that sample alone: one gradient step, no batch statistics, no dropout.

    None otherwise, and where the model has no forward-mode derivatives.
    """
    public = exposure.public
    if share_of_one_sample(public, exposure.update, LAYER_NAMES) is None or mixes_samples(layer.body):
        return None
    replayer = Replayer(exposure, layer, labels)
    return replayer if replayer.is_possible() else None
