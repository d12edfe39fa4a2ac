"""Fishing for user data: a last layer that silences all samples of a class but those with a small feature, down to a single one."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.attacks.inverting_gradients import InvertingGradients
from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.counts import estimate_of
from dosimeter.engines.sample_share import takes_local_steps
from dosimeter.interfaces import ActiveAttack, Exposure
from dosimeter.network.copies import deep_copy
from dosimeter.network.head import Head, find_head
from dosimeter.network.input_shape import find_head_name, find_input_shape
from dosimeter.options import FiniteFloat, NonNegativeInt, PositiveFloat, PositiveInt, mismatch
from dosimeter.registry import ATTACKS
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction, Refused

SHUT_OUT = 1e3  # nats below all other classes: no sample is given to the target class
LEAST_SPREAD = 1e-3  # of a sample: biases of the other classes that differ by more show samples of these classes
WHOLE = 0.05  # of a sample: how far the number of samples that passed may be from a whole number
MOST_MATCHED = 8  # samples: beyond, matching shows little


@ATTACKS.register("fishing")
@dataclass(frozen=True, kw_only=True)
class Fishing(ActiveAttack):
    """Silences all samples of one class but those whose feature is below a cutoff, until one sample's gradient is left.

    Wen et al., "Fishing for User Data in Large-Batch Federated Learning via Gradient Magnification", ICML 2022. Class fishing, without
    `cutoff`: the other classes' rows are zero and the target's bias is so low that its samples alone send a gradient below the head.
    Feature fishing, with `cutoff` θ: the target's logit is strength · (f_j − θ). A sample of the target class above θ is classified with
    certainty and sends nothing. One below θ sends strength/B times the gradient of −f_j. `next_round` sets θ to the mean f_j of the samples
    that passed, read off the head's gradient, so that every round passes fewer; the last is the sample with the smallest feature.
    The layer's form agrees with the authors' released code; the rest is from memory of the paper.
    Departures: by default j is the feature with the largest mean over the class. A sample of another class passes where f_j > θ. So feature
    fishing claims nothing unless the whole batch is of the target class, as the paper's users have it; this is tested by the bias
    gradient, whose entries for the other classes are then equal. Matching runs at a head that lets every guess pass.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset(
        {Knowledge.TAMPERED_MODEL, Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.BATCH_SIZE}
    )

    target: NonNegativeInt
    feature: NonNegativeInt | None = None  # j; none: `next_round` takes the one with the largest mean
    cutoff: FiniteFloat | None = None  # θ; none: class fishing
    strength: PositiveFloat = 1e5
    input_shape: tuple[PositiveInt, ...] | None = None
    steps: PositiveInt = 2400
    restarts: PositiveInt = 1
    seconds: PositiveFloat | None = None

    def tamper(self, model: nn.Module) -> nn.Module:
        shape = self.input_shape or find_input_shape(model)
        return self._with_head(model, find_head_name(model, shape), self.cutoff)

    def next_round(self, exposure: Exposure) -> Fishing:
        """The attack with the cutoff at the mean feature of the samples that passed in this round."""
        head = find_head(exposure)
        passed = self._passed(exposure, head)
        assert head.weight_gradient is not None
        if passed <= 0:
            raise Refused(f"fishing: no sample of class {self.target} passed in this round; raise the cutoff")
        mean = -_size(exposure) / passed * head.weight_gradient[self.target].double()  # (H,)
        feature = int(mean.argmax()) if self.feature is None else self.feature
        return replace(self, feature=feature, cutoff=float(mean[feature]))

    def passed(self, exposure: Exposure) -> float:
        """How many samples sent a gradient below the head."""
        return self._passed(exposure, find_head(exposure))

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        head = find_head(exposure)
        passed = self._passed(exposure, head)
        note = f"{passed:.3g} of {_size(exposure)} samples passed"
        if self.cutoff is not None and self._spread(exposure, head) > LEAST_SPREAD:
            message = f"the batch has samples of other classes, which pass where the feature is above the cutoff ({note}, at least)"
            return exposure.without_inputs(Outcome.AMBIGUOUS, message)
        count = round(passed)
        if abs(passed - count) > WHOLE:
            return exposure.without_inputs(
                Outcome.AMBIGUOUS, f"{note}, no whole number: a feature lies at the cutoff, or entries were changed"
            )
        if not 0 < count <= MOST_MATCHED:
            wanted = "raise the cutoff" if count == 0 else "send `next_round`"
            return exposure.without_inputs(Outcome.NOT_ATTEMPTED, f"{note}: {wanted}")
        alone = self.calibrate(exposure)
        counts = torch.zeros(exposure.public.classes, dtype=torch.int64)
        counts[self.target] = count
        matching = InvertingGradients(steps=self.steps, restarts=self.restarts, seconds=self.seconds, polish=self.steps // 2)
        found = matching(alone, estimate_of(counts, scores=counts.double()), rng)
        return replace(found, message="; ".join(part for part in (note, found.message) if part))

    def calibrate(self, exposure: Exposure) -> Exposure:
        """What the samples that passed would have sent alone, at a head of strength 1 that gives no sample to the target class."""
        head = find_head(exposure)
        assert head.weight_gradient is not None
        factor = _size(exposure) / self._passed(exposure, head)
        strength = 1.0 if self.cutoff is None else self.strength  # by which feature fishing magnifies what is below the head
        update = {name: factor / strength * change for name, change in exposure.update.items()}
        prefix = f"{head.name}." if head.name else ""
        others = torch.full_like(head.weight_gradient[:, 0], 1 / (exposure.public.classes - 1))
        others[self.target] = -1.0  # p − y of every sample that passed
        mean = -factor * head.weight_gradient[self.target]
        update[prefix + "weight"], update[prefix + "bias"] = torch.outer(others, mean), others
        model = deep_copy(exposure.model)
        with torch.no_grad():
            model.get_parameter(prefix + "weight").div_(strength)
            model.get_parameter(prefix + "bias")[self.target] = -SHUT_OUT
        public = replace(exposure.public, batch_size=round(self._passed(exposure, head)))
        return replace(exposure, model=model, update=update, public=public)

    def _with_head(self, model: nn.Module, name: str, cutoff: float | None) -> nn.Module:
        model = deep_copy(model)
        layer = model.get_submodule(name)
        own = dict(layer.named_parameters(recurse=False))
        assert isinstance(layer.weight, Tensor)
        if "weight" not in own or (layer.bias is not None and "bias" not in own):
            raise Refused(f"fishing sets the weights of the last layer {name!r}, which are computed from others here")
        classes, features = layer.weight.shape
        if self.target >= classes:
            raise mismatch("attack.target", f"a class id in 0..{classes - 1}", self.target)
        if cutoff is not None and (self.feature is None or self.feature >= features):
            raise mismatch("attack.feature", f"with a cutoff, a feature in 0..{features - 1}", self.feature)
        with torch.no_grad():
            if layer.bias is None:
                layer.bias = nn.Parameter(layer.weight.new_zeros(classes))
            assert isinstance(layer.bias, Tensor)
            row = layer.weight[self.target].clone()
            if cutoff is not None:
                assert self.feature is not None
                row.zero_()[self.feature] = self.strength
            layer.weight.zero_()[self.target] = row
            layer.bias.zero_()[self.target] = -SHUT_OUT if cutoff is None else math.log(classes - 1) - self.strength * cutoff
        return model

    def _passed(self, exposure: Exposure, head: Head) -> float:
        """−B times the target's bias gradient: every sample that passed adds −1, every other sample of the class 0."""
        self._require_mark(exposure, head)
        if head.bias_gradient is None or head.weight_gradient is None:
            raise Refused("fishing reads the gradients of the last layer's weight and bias, and one of them was not sent")
        return -_size(exposure) * float(head.bias_gradient[self.target])

    def _spread(self, exposure: Exposure, head: Head) -> float:
        """By how much the other classes' bias gradients differ, in samples: 0 where the whole batch is of the target class."""
        assert head.bias_gradient is not None
        others = head.bias_gradient[torch.arange(len(head.bias_gradient), device=head.bias_gradient.device) != self.target]
        return _size(exposure) * float(others.max() - others.min())

    def _require_mark(self, exposure: Exposure, head: Head) -> None:
        public = exposure.public
        if not isinstance(public.loss, CrossEntropy) or public.loss.smoothing:
            raise Refused("fishing needs softmax cross-entropy without label smoothing, under which certain samples send no gradient")
        if takes_local_steps(public.training):
            raise Refused("fishing needs one gradient at the model as sent; local steps move the head")
        others = torch.arange(len(head.weight), device=head.weight.device) != self.target
        if head.bias is None or bool(head.weight[others].any()) or bool(head.bias[others].any()) or not bool(head.weight.any()):
            raise Refused("fishing needs a model that bears its head: send dm.attack('fishing', target=...).tamper(model) and observe that")


def _size(exposure: Exposure) -> int:
    size = exposure.public.batch_size
    assert size is not None  # in `needs`
    return size
