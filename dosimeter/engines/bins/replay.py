"""The weight δ that a model gives an input at an inserted layer, computed for every label as the client computes it."""

from __future__ import annotations

import copy
import math

import torch
from torch import Tensor

from dosimeter.engines.bins.inserted_layer import LAYER_NAMES, LAYER_STRENGTH, InsertedLayer
from dosimeter.engines.cancelling_labels import every_label, labels_can_cancel
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.recursion.levels import snap_to_levels
from dosimeter.engines.sample_share import mixes_samples, sends_gradient_at_model, share_of_one_sample, unscaled_layers
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, forward
from dosimeter.normalization import input_bounds

CHANCE_TOLERANCE = 5e-3  # over the number of labels: within more, mixtures pass by chance
SURE_TOLERANCE = 1e-4  # likewise, where nothing else confirms a sample
LEAST_TOLERANCE = 3e-6  # the model's own rounding
LIKELY = 3e-4  # the chance from which on an undeclared size may be a coincidence
MOST_SAMPLES = 256  # in a batch of undeclared size
LABEL_TOLERANCE = 3e-3  # relative difference of weights up to which a label is named


class Replayer:
    """Computes δ = (strength / k) · ∂ℓ/∂x̃ · share of inputs under every label, as the client does for its own samples.

    The share of one sample is 1 / B. Where the size B or a factor of the whole update is unknown, `calibrate` finds the shares.
    """

    def __init__(self, exposure: Exposure, layer: InsertedLayer, share: float | None, labels: Tensor | None = None) -> None:
        public = exposure.public
        self.layer, self.loss, self.shape = copy.deepcopy(layer), public.loss, public.input_shape
        self.normalization = public.normalization
        self.labels = torch.arange(public.classes) if labels is None else labels  # that a sample may have
        # relative differences of weights: less is rounding, and more confirms no sample
        self.least, self.exact, self.surest = LEAST_TOLERANCE, CHANCE_TOLERANCE / len(self.labels), SURE_TOLERANCE / len(self.labels)
        self.factor, self.batch_size = LAYER_STRENGTH / sum(layer.bins), public.batch_size
        self.shares: list[float] = [] if share is None else [share]  # of one sample in the update, that are possible
        self.trusted = False  # whether a weight counts where labels can cancel, as for candidates that something else proves later

    def __call__(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """Relative difference between each weight and the nearest that any label gives the input: (n,)."""
        return self.mismatch(inputs, weights).amin(1)

    def find_labels(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """The label that fits each sample's weight best, −1 where none does: (n,)."""
        difference, best = self.mismatch(inputs, weights).min(1)
        labels = self.labels.to(best.device)[best]
        return torch.where(difference <= LABEL_TOLERANCE, labels, -1)

    def mismatch(self, inputs: Tensor, weights: Tensor) -> Tensor:
        """How far the weight of each label, under the share that fits best, is from the observed one, relative to it: (n, labels)."""
        shares = torch.tensor(self.shares, dtype=torch.float64, device=weights.device)
        expected = self._weights_of_one(inputs)[..., None] * shares  # (n, labels, shares)
        return ((expected - weights[:, None, None]).abs() / weights[:, None, None].abs()).amin(2)

    def calibrate(self, inputs: Tensor, weights: Tensor, tolerance: Tensor) -> None:
        """Find the shares under which all of these single samples have their weights, up to `tolerance` (n,).

        An undeclared size is a whole number. Then the samples need not be single: the size counts that so many of them have under some
        label that chance does not explain it.
        """
        ratios = weights[:, None] / self._weights_of_one(inputs)  # (n, labels): the share under each label
        tolerance = tolerance.clamp_max(self.exact)
        if self.batch_size is None:
            size = _common_size(ratios, tolerance)
            self.shares = [] if size is None else [1 / size]
            return
        fits = [((ratios / share - 1).abs() <= (tolerance + tolerance[0])[:, None]).any(1).all() for share in ratios[0]]
        self.shares = [float(share) for share, fit in zip(ratios[0], fits, strict=True) if fit and float(share) > 0]

    def _weights_of_one(self, inputs: Tensor) -> Tensor:
        """The weight that each label gives an input that is the whole batch: (n, labels)."""
        like = self.layer.rows.weight
        samples = snap_to_levels(inputs.reshape(-1, *self.shape), self.normalization).to(
            like
        )  # exactly on the levels: kinks must fall as they did for the client
        reached = [self._logits_and_slopes(piece) for piece in samples.split(64)]
        logits, slopes = (torch.cat(parts).double() for parts in zip(*reached))  # (n, C)
        ids = torch.ones(len(samples), dtype=torch.int64, device=logits.device)
        columns = [(self.loss.logit_gradient(logits, int(label) * ids) * slopes).sum(1) for label in self.labels]
        return self.factor * torch.stack(columns, 1)

    def labels_can_cancel(self) -> bool:
        """Whether samples can share a bin with one more and add no weight to it, since the model predicts the same for all inputs."""
        if self.trusted:
            return False
        low, high = input_bounds(self.normalization, self.layer.rows.weight.new_zeros(1, *self.shape))
        ends = torch.cat([low.expand(1, *self.shape), high.expand(1, *self.shape)])
        logits = self._logits_and_slopes(ends)[0].double()  # (2, C)
        labels = every_label(logits.shape[1]).to(logits)
        here, there = (self.loss.logit_gradient(row.expand(len(labels), -1), labels) for row in logits[:, None])
        return labels_can_cancel(here, there, labels, self.batch_size or MOST_SAMPLES, self.labels if logits.shape[1] > 1 else None)

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

    None otherwise, where targets are numbers, which cannot be tried one by one, where the model has no forward-mode derivatives, and where
    both the size and the scale are unknown.
    """
    public = exposure.public
    if not sends_gradient_at_model(public.training) or mixes_samples(layer.body) or public.loss.target_kind() == "numbers":
        return None
    share = share_of_one_sample(public, exposure.update, LAYER_NAMES)
    if public.batch_size is None and not unscaled_layers(public, exposure.update).issuperset(LAYER_NAMES):
        return None
    replayer = Replayer(exposure, layer, share, labels)
    return replayer if replayer.is_possible() else None


def _common_size(ratios: Tensor, tolerance: Tensor) -> int | None:
    """The whole number that the inverses of most samples' shares (n, labels) have in common; None where chance may explain it.

    One wrong sample has a given number, under any label, with about the chance 2 · tolerance · labels. So v of n wrong samples have some
    number in common with at most binomial(n, v) times the chance's power v, times the numbers that are tried.
    """
    sizes = torch.arange(1, MOST_SAMPLES + 1, device=ratios.device, dtype=ratios.dtype)
    fits = ((ratios[..., None] * sizes - 1).abs() <= tolerance[:, None, None]).any(1)  # (n, sizes)
    votes = fits.sum(0)
    most, count = int(votes.max()), len(ratios)
    chance = min(1.0, 2 * float(tolerance.max()) * ratios.shape[1])
    tried = 1 if count == 1 and bool(votes[0]) else MOST_SAMPLES  # a lone sample is most likely the whole batch
    if most == 0 or int((votes == most).sum()) > 1 or math.comb(count, most) * chance**most * tried > LIKELY:
        return None
    return int(sizes[votes.argmax()])
