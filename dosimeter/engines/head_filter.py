"""GradFilt's filter in the last layer: how it is planted, found again, and how labels and gradients are read behind it."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn

from dosimeter.client.losses import CrossEntropy, Focal
from dosimeter.engines.counting.batch_size import declared_or_inferred
from dosimeter.engines.counting.counts import estimate_of, nearest_counts, whole_number_confidence
from dosimeter.engines.sample_share import takes_local_steps
from dosimeter.interfaces import ActiveAttack, Exposure, Loss
from dosimeter.network.copies import deep_copy
from dosimeter.network.head import Head, find_head
from dosimeter.network.input_shape import find_head_name, find_input_shape
from dosimeter.network.probing import record_calls
from dosimeter.options import NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, mismatch
from dosimeter.randomness import generator
from dosimeter.types import Knowledge, LabelEstimate, Outcome, Reconstruction, Refused

BIAS = 1e3  # Ω: more would round away what local steps add to the biases
LEAST_BIAS = 4.0  # e^4: with less no class is shut out
WHOLE_CONFIDENCE = 0.5  # from which counts are whole numbers: none is off by more than a quarter of a sample
WHOLE_CONFIDENCE_STRETCHED = 0.98  # the same of an update whose scale had to be found first
LARGEST_SUM = 0.25  # of a sample: how far the bias gradient's sum may be from zero
TARGET_GAP = 0.2  # of the largest bias: how far below it every target's bias lies in a filter


@dataclass(frozen=True, kw_only=True)
class Filter:
    """A last layer under which every sample has the same probabilities, and those of the targets are zero."""

    head: Head
    targets: Tensor  # (t,) class ids
    probabilities: Tensor  # (C,) p' of Eq. (5.12), of every sample


@dataclass(frozen=True, kw_only=True)
class FilteringAttack(ActiveAttack):
    """An attack behind the filter: restore the labels, calibrate the gradients, and recover the target samples from these."""

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.TAMPERED_MODEL, Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})

    targets: tuple[NonNegativeInt, ...]
    bias: PositiveFloat = BIAS  # Ω
    scale: PositiveFloat = 1.0  # α
    camouflage: NonNegativeFloat = 0.0  # relative size of the noise that is left in the zeroed rows, against a client that looks at them
    input_shape: tuple[PositiveInt, ...] | None = None

    @abstractmethod
    def recover(self, exposure: Exposure, calibrated: Exposure, labels: LabelEstimate, rng: Generator) -> tuple[Reconstruction, str]:
        """The target samples, of whose classes `labels` tells, and a note on their number."""

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        restored = restore_labels(exposure, self.name)
        calibrated, of_targets = calibrate(exposure, restored)
        note = f"{len(of_targets.labels)} of {int(restored.counts.sum())} samples are of the target classes"
        if restored.message:
            note += f" ({restored.message})"
        if len(of_targets.labels) == 0:
            outcome = Outcome.NOT_ATTEMPTED if restored.outcome is Outcome.COMPLETED else restored.outcome
            return exposure.without_inputs(outcome, note)
        found, on_number = self.recover(exposure, calibrated, of_targets, rng)
        note += on_number
        if any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.training for m in exposure.model.modules()):
            note += "; batch norm in train mode mixes the other samples in"
        outcome = restored.outcome if found.outcome is Outcome.COMPLETED else found.outcome
        return replace(found, outcome=outcome, message="; ".join(part for part in (note, found.message) if part))

    def plant(self, model: nn.Module, round_number: int = 0) -> nn.Module:
        """A copy of the model with the filter; refused where the targets' own logits overcome the bias."""
        shape = self.input_shape or find_input_shape(model)
        rng = generator(round_number, "gradfilt camouflage")
        head = find_head_name(model, shape)
        filtered = plant_filter(model, head, self.targets, bias=self.bias, scale=self.scale, camouflage=self.camouflage, rng=rng)
        require_filtering(filtered, head, shape, self.targets, self.bias)
        return filtered

    def calibrate(self, exposure: Exposure) -> tuple[Exposure, LabelEstimate]:
        """What the target samples alone would have sent, and their labels."""
        return calibrate(exposure, restore_labels(exposure, self.name))


def plant_filter(
    model: nn.Module, head: str, targets: tuple[int, ...], *, bias: float, scale: float, camouflage: float, rng: Generator
) -> nn.Module:
    """A copy whose last layer is the filter of Section 5.4.2: rows W'_k = 0 and biases Ω off the targets, α W_t on them.

    It controls the gradient at the features, ∇a = Wᵀ(p − y) (Eq. 5.9). A target sample has ∇a' = −α W_tᵀ (Eq. 5.10) and every other
    sample has 0, so the mean over the batch is that of the target samples (Eq. 5.11).
    """
    model = deep_copy(model)
    layer = model.get_submodule(head)
    assert isinstance(layer.weight, Tensor)
    own = dict(layer.named_parameters(recurse=False))
    if "weight" not in own or (layer.bias is not None and "bias" not in own):
        raise Refused(f"gradfilt sets the weights of the last layer {head!r}, which are computed from others here, as weight_norm does it")
    classes = len(layer.weight)
    if not targets or len(set(targets)) != len(targets) or not all(0 <= target < classes for target in targets):
        raise mismatch("attack.targets", f"different class ids in 0..{classes - 1}", list(targets))
    if len(targets) == classes:
        raise mismatch("attack.targets", f"fewer than all {classes} classes", list(targets))
    if bias < LEAST_BIAS:
        raise mismatch("attack.bias", f"at least {LEAST_BIAS:g}, with less no class is shut out", bias)
    target = torch.zeros(classes, dtype=torch.bool, device=layer.weight.device)
    target[list(targets)] = True
    with torch.no_grad():
        if layer.bias is None:
            layer.bias = nn.Parameter(layer.weight.new_zeros(classes))
        assert isinstance(layer.bias, Tensor)
        noise = torch.randn(layer.weight.shape, generator=rng).to(layer.weight)
        covered = camouflage * layer.weight.square().mean().sqrt() * noise
        layer.weight.copy_(torch.where(target[:, None], scale * layer.weight, covered))
        layer.bias.copy_(torch.where(target, scale * layer.bias, bias))
    return model


def require_filtering(model: nn.Module, head: str, input_shape: tuple[int, ...], targets: tuple[int, ...], bias: float) -> None:
    """Refuse a filter whose bias the targets' own logits overcome, on inputs of noise."""
    probes = torch.randn(8, *input_shape, generator=generator(0, "gradfilt probes")).to(next(model.parameters()))
    _, calls = record_calls(model, probes, lambda name, _: name == head, evaluate=True)
    strongest = float(calls[-1].given[..., list(targets)].nan_to_num(torch.inf, torch.inf).max())
    if strongest > bias:
        raise mismatch("attack.scale", f"one that leaves the targets' logits below the bias {bias:g}", f"logits of up to {strongest:.3g}")


def find_filter(exposure: Exposure) -> Filter:
    """The filter in the model as it was sent; refused where there is none."""
    head = find_head(exposure)
    if head.bias is None or float(head.bias.max()) < LEAST_BIAS:
        raise Refused(_UNMARKED)
    low = head.bias < (1 - TARGET_GAP) * head.bias.max()
    settled = head.bias[~low]
    if not bool(low.any()) or float(settled.max() - settled.min()) > 1e-6 * float(settled.max()):
        raise Refused(_UNMARKED)
    probabilities = (~low).double() / int((~low).sum())
    return Filter(head=head, targets=low.nonzero().flatten(), probabilities=probabilities)


_UNMARKED = (
    "gradfilt needs a model that bears its filter: send dm.attack('gradfilt', targets=...).tamper(model) to the client and observe that"
)


def restore_labels(exposure: Exposure, name: str) -> LabelEstimate:
    """λ = B (p' − ∇b') (Eq. 5.14), for every softmax loss whose gradient at the logits is φ_y (q − y)."""
    planted = find_filter(exposure)
    gradient = planted.head.bias_gradient
    assert gradient is not None
    share, weight = _gradient_form(exposure.public.loss, planted)
    shares = _shares(share, weight, gradient.double())  # (C,) λ / B
    size, outcome, message = declared_or_inferred(exposure.public.batch_size, shares, planted.head.weight_gradient, name)
    counts = nearest_counts(size * shares, size)
    whole = whole_number_confidence(size * shares, counts)
    stretch = _stretch(planted, share, weight, gradient.double()) if whole < WHOLE_CONFIDENCE else 1.0
    if stretch != 1.0:
        stretched = _shares(share, weight, gradient.double() / stretch)
        sums = nearest_counts(size * stretched, size)
        if (certainty := whole_number_confidence(size * stretched, sums)) >= WHOLE_CONFIDENCE_STRETCHED:
            shares, counts, whole = stretched, sums, certainty
            message = "; ".join(filter(None, (message, f"the update is {stretch:.3g} times a gradient, as clipping makes it")))
        else:
            stretch = 1.0
    confidence = whole if outcome is Outcome.COMPLETED else None  # of a guessed size there is none
    notes = [message]
    if takes_local_steps(exposure.public.training):
        notes.append("local steps move the filter, so that the counts are not exact")
    if whole < WHOLE_CONFIDENCE:
        outcome = Outcome.AMBIGUOUS
        notes.append("the sums of the labels are no whole numbers: labels are soft, or noise or the rounding of weights hides them")
    if size * abs(float(gradient.double().sum())) > LARGEST_SUM * float(weight.max()):
        outcome = Outcome.AMBIGUOUS
        notes.append("the bias gradient does not add up to zero, as that of every sample does: the update was changed")
    return estimate_of(
        counts,
        scores=size * shares,
        confidence=confidence,
        outcome=outcome,
        message="; ".join(note for note in notes if note),
        details={"probabilities": planted.probabilities, "targets": planted.targets, "stretch": torch.tensor(stretch)},
    )


def calibrate(exposure: Exposure, labels: LabelEstimate) -> tuple[Exposure, LabelEstimate]:
    """The exposure that the target samples alone would have made (Eqs. 5.16-5.22), and their labels.

    Below the head every gradient is scaled by B/|x_t| (Eq. 5.22, whose minus sign is a slip). In the head the targets' rows, where p' = 0,
    hold their own samples alone. Scaled by the same factor they are exact, also for several targets; the outer product of Eq. (5.21) is
    exact for one. The other rows are p'_k ā with ā the targets' mean feature (Eqs. 5.16 and 5.19). The bias gradient is
    p' − λ_t/|x_t| (Eq. 5.20 with the restored counts).
    """
    planted = find_filter(exposure)
    head, targets = planted.head, planted.targets
    of_targets = torch.zeros_like(labels.counts)
    of_targets[targets] = labels.counts[targets]
    wanted = int(of_targets.sum())
    share, weight = _gradient_form(exposure.public.loss, planted)
    factor = int(labels.counts.sum()) / max(wanted, 1) / float(labels.details.get("stretch", 1.0))
    update = {name: factor * change for name, change in exposure.update.items()}
    prefix = f"{head.name}." if head.name else ""
    mean_weight = (of_targets * weight).sum() / max(wanted, 1)  # of φ, over the target samples
    if head.weight_gradient is not None:
        rows = factor * head.weight_gradient  # (C, H)
        mean = -rows[targets].double().sum(0)  # φ-weighted mean feature ā (H,)
        is_target = (of_targets.new_zeros(len(of_targets)).index_fill(0, targets, 1) > 0)[:, None]
        update[prefix + "weight"] = torch.where(is_target, rows, (share[:, None] * mean).to(rows))
    if head.bias_gradient is not None:
        update[prefix + "bias"] = (share * mean_weight - weight * of_targets / max(wanted, 1)).to(head.bias_gradient)
    kept = estimate_of(of_targets, scores=of_targets.double())
    return replace(exposure, update=update, public=replace(exposure.public, batch_size=wanted)), kept


def _gradient_form(loss: Loss, planted: Filter) -> tuple[Tensor, Tensor]:
    """q (C,) and φ (C,) with which the gradient at a filtered sample's logits is φ_y (q − e_y).

    Cross-entropy with smoothed labels w y + c: φ = w/τ, q = (p' − c)/w. Focal loss: φ_y its weight at p'_y, q = p'.
    """
    p = planted.probabilities
    if isinstance(loss, CrossEntropy):
        nothing = torch.zeros(1, len(p), dtype=torch.float64, device=p.device)
        constant = loss.smooth_targets(nothing, len(p), torch.float64)[0]  # c
        kept = (loss.smooth_targets(nothing + 1, len(p), torch.float64)[0] - constant)[0]  # w
        if kept <= 0:
            raise Refused("gradfilt reads labels off the bias gradient; with label smoothing 1 they leave no trace there")
        return (p - constant) / kept, torch.full_like(p, float(kept) / loss.temperature)
    if isinstance(loss, Focal):
        weight = loss.weight(loss.temperature * p.clamp_min(1e-300).log()[None])[0] / loss.temperature
        if bool((weight <= 0).any()):
            raise Refused(
                "gradfilt under focal loss needs two classes that are not targets: the only one gets probability 1 and no gradient"
            )
        return p, weight
    raise Refused(
        f"gradfilt needs softmax cross-entropy or focal loss, under which large biases fix the probabilities; this is {loss.name}"
    )


def _stretch(planted: Filter, share: Tensor, weight: Tensor, bias_gradient: Tensor) -> float:
    """The factor s where the update is s times a gradient. A class without samples has the entry s q_k φ, the largest of all.

    1 where φ depends on the class, since the batch's mean φ is then unknown, or where no class can be read.
    """
    others = torch.ones_like(share, dtype=torch.bool).index_fill(0, planted.targets, False) & (share > 0)
    if not bool(others.any()) or not torch.equal(weight, weight[:1].expand_as(weight)):
        return 1.0
    found = float((bias_gradient / (share * weight))[others].max())
    return found if 0 < found < torch.inf else 1.0


def _shares(share: Tensor, weight: Tensor, bias_gradient: Tensor) -> Tensor:
    """λ_k / B = (q_k S − ∇b_k) / φ_k, with S = Σ φ_y λ_y / B from the shares' sum of one: (C,)."""
    total = (1 + (bias_gradient / weight).sum()) / (share / weight).sum()
    return (share * total - bias_gradient) / weight
