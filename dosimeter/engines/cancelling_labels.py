"""Whether the gradients of several samples can add up to zero, so that they hide behind the weight of one more sample."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.engines.sample_share import mixes_samples
from dosimeter.interfaces import Exposure, Loss
from dosimeter.network.probing import copied_buffers, forward
from dosimeter.types import Refused

CONSTANT_CHANGE = 2e-3  # relative, of the derivative at the logits: with less, samples whose labels cancel add no weight that shows
LABELS_CANCEL = 1e-4  # distance from a mean of labels up to which a prediction is one
MOST_SAMPLES = 64  # in a batch of undeclared size
WHOLE_RATIOS = (0.5, 1.0, 2.0)  # of the derivatives under two labels, with which sums of few pictures can be a picture again
NEAR_RATIO = 0.05  # relative: two alike pictures miss the levels by a part of their difference only
MOST_CLASSES = 4096  # of which all labels are tried
PIECE = 64  # inputs in one pass


def every_label(classes: int) -> Tensor:
    """The hard labels that one sample can have, as targets: (C, C), or 0 and 1 for one logit: (2, 1)."""
    return torch.eye(classes, dtype=torch.float64) if classes > 1 else torch.tensor([[0.0], [1.0]], dtype=torch.float64)


def relative_change(errors: Tensor, elsewhere: Tensor) -> float:
    """By how much the derivatives at the logits, under every label (labels, C), differ from those of another input."""
    return float((errors - elsewhere)[0].norm() / errors[0].norm().clamp_min(torch.finfo(errors.dtype).tiny))


def labels_can_cancel(errors: Tensor, elsewhere: Tensor, labels: Tensor, most_samples: int, occurring: Tensor | None = None) -> bool:
    """Whether other samples can share all rows with one sample and add no weight to them.

    Where the model predicts the same p for all inputs, k samples add Σ (p − y_i). This is zero if p is the mean of their labels: for
    p = 1/C, one sample of each class. A mixture of these and one more then has the weight of one sample. `errors` (labels, C) are the
    derivatives at the logits under each of the `labels` (labels, C), `elsewhere` those of an empty input. Where the labels that occur are
    known, as class ids, p must be a mean of these.
    """
    change = relative_change(errors, elsewhere)
    if change >= CONSTANT_CHANGE:
        return False
    predictions = errors + labels.to(errors)  # (labels, C): all p, if the error is p − y
    if bool((predictions - predictions[0]).abs().max() > LABELS_CANCEL):
        return True
    if bool(((predictions[0] - predictions[0].round()).abs() <= LABELS_CANCEL).all()):
        return False  # a sure model: p is a label, and only samples of this label cancel, each by itself
    if occurring is not None:
        absent = predictions[0].index_fill(0, occurring.to(predictions.device), 0)
        if bool((absent > LABELS_CANCEL + change).any()):
            return False
    return _is_mean_of_labels(predictions[0], most_samples - 1, LABELS_CANCEL + change)


def _is_mean_of_labels(prediction: Tensor, most: int, slack: float) -> bool:
    """Whether counts of labels (C,) exist, of 1 to `most` samples, whose mean lies within `slack` of the prediction in every entry."""
    counts = torch.arange(1, most + 1, device=prediction.device)[:, None]  # (k, 1)
    low, high = (counts * (prediction - slack)).ceil().clamp_min(0), (counts * (prediction + slack)).floor()  # (k, C)
    possible = (low <= high).all(1)
    if abs(float(prediction.sum()) - 1) <= slack and len(prediction) > 1:  # one label a sample
        possible &= (low.sum(1) <= counts[:, 0]) & (high.sum(1) >= counts[:, 0])
    return bool(possible.any())


@torch.no_grad()
def sums_may_pass(exposure: Exposure, inputs: Tensor) -> Tensor:
    """Which inputs (n, *shape) may be sums of samples that pass for one, by the levels of their pixels or through local steps: (n,) bool.

    Where two labels have derivatives at the logits of one size, the samples of a row have weights 1 and −1: x_1 + x_2 − x_3 lies on levels,
    and in the data range if the samples are alike. Local steps move the neurons as one sample would. With two classes, a ratio of two
    does the same: 2 x_1 − x_2. With more classes, the rows' weights of different labels are in no such ratio, unless `labels_can_cancel`.
    """
    public, nothing = exposure.public, torch.zeros(len(inputs), dtype=torch.bool, device=inputs.device)
    if public.loss.target_kind() == "numbers" or mixes_samples(exposure.model) or not len(inputs):
        return nothing
    tensors = ({name: parameter.detach() for name, parameter in exposure.model.named_parameters()}, copied_buffers(exposure.model))
    samples = torch.cat([torch.zeros_like(inputs[:1]), inputs]).reshape(-1, *public.input_shape).to(next(exposure.model.parameters()))
    logits = torch.cat([forward(exposure.model, tensors, piece).reshape(len(piece), -1) for piece in samples.split(PIECE)]).double()
    try:
        open_ones = [_levels_are_open(public.loss, one, logits[0], public.batch_size or MOST_SAMPLES) for one in logits[1:]]
    except Refused:  # of the client's own loss no closed form is known
        return nothing
    return torch.tensor(open_ones, dtype=torch.bool, device=inputs.device)


def _levels_are_open(loss: Loss, logits: Tensor, blank: Tensor, most_samples: int) -> bool:
    """The same of one input with these logits (C,), where an empty one has the logits `blank` (C,)."""

    def errors(at: Tensor, labels: Tensor) -> Tensor:
        return loss.logit_gradient(at.expand(len(labels), -1), labels)

    first = torch.zeros_like(logits[None]).index_fill_(1, torch.tensor([0], device=logits.device), 1.0)
    constant = relative_change(errors(logits, first), errors(blank, first)) < CONSTANT_CHANGE
    if not 1 <= len(logits) <= (MOST_CLASSES if constant else 2):
        return False  # no few labels have a mean like 1/C
    labels = every_label(len(logits)).to(logits)
    own = errors(logits, labels)
    return _may_sum_to_a_picture(own) or labels_can_cancel(own, errors(blank, labels), labels, most_samples)


def _may_sum_to_a_picture(errors: Tensor) -> bool:
    """Whether there are two labels, and their derivatives at the logits (2, C) have a ratio of small whole numbers."""
    if len(errors) != 2:
        return False
    one, other = errors.norm(dim=1).clamp_min(torch.finfo(errors.dtype).tiny).tolist()
    return any(abs(one / other / ratio - 1) <= NEAR_RATIO for ratio in WHOLE_RATIOS)
