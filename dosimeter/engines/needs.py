"""What a method needs of the threat model, checked before it runs."""

from __future__ import annotations

import torch

from dosimeter.client.observe import observe
from dosimeter.client.training import FedAvg
from dosimeter.engines.sample_share import training_of_one_client
from dosimeter.interfaces import Attack, Exposure, Method
from dosimeter.network.head import find_head, parameter_name
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator
from dosimeter.types import Batch, Impossible, Knowledge, LabelEstimate, Refused

ZERO_UPDATE = "the update is zero in every layer"
ZERO_THEOREM = "random samples with random labels give the same zero, so no method can tell the private batch from random ones"
ZERO_TELLS = "random samples with random labels do not give zero, so the zero tells something of the batch, and no method here reads it"
ZERO_OPEN = "no random samples are known that this protocol takes, so it is open whether the zero tells anything of the batch"
RANDOM_SAMPLES = 16  # whose update is compared with a zero update
NEEDS_WITH_ARTICLE = {Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT, Knowledge.BATCH_SIZE}


def check_possible(exposure: Exposure) -> None:
    """Refuse an exposure from which no method can recover anything, with the theorem that says so."""
    if refusal := refusal_of_zero(exposure):
        raise refusal


def refusal_of_zero(exposure: Exposure) -> Refused | None:
    """Why nothing is read from an update of zeros; None where the update is not zero.

    It is a proof only where the model gives random samples a zero update too. Else a zero update is information: a network without
    biases gives it for black images, and a certain one for samples whose labels it expects.
    """
    if any(bool(change.any()) for change in exposure.update.values()):
        return None
    zero = _random_update_is_zero(exposure)
    if zero:
        return Impossible(ZERO_UPDATE, theorem=ZERO_THEOREM)
    return Refused(f"{ZERO_UPDATE}: {ZERO_OPEN if zero is None else ZERO_TELLS}")


def _random_update_is_zero(exposure: Exposure) -> bool | None:
    """Whether a batch of noise, with labels of all classes as far as they go, gives a zero update under the same protocol.

    None where the protocol takes no such batch.
    """
    public, weight = exposure.public, next(exposure.model.parameters())
    rng = generator(0, "random samples for a zero update")
    pixels = torch.rand((RANDOM_SAMPLES, *public.input_shape), generator=rng)
    labels = torch.randperm(max(public.classes, 2, RANDOM_SAMPLES), generator=rng)[:RANDOM_SAMPLES] % max(public.classes, 2)
    if public.loss.target_kind() == "numbers":
        labels = torch.randn(RANDOM_SAMPLES, *(public.output_shape or (public.classes,)), generator=rng).to(weight)
    batch = Batch(from_pixels(pixels, public.normalization).to(weight), labels.to(weight.device))
    options = {"training": public.training, "loss": public.loss, "normalization": public.normalization}
    defenses = [defense for defense in public.defenses if defense.side != "model"]  # the exposure's model bears the others already
    try:
        update = observe(exposure.model, batch, defenses=defenses, **options).update
    except ValueError:
        return None
    return not any(bool(change.any()) for change in update.values())


def check_needs(method: Method, exposure: Exposure, labels: LabelEstimate | None) -> None:
    """Refuse, with the reason and the remedy, a method that needs what this threat model does not grant."""
    if labels is not None and not method.partial_labels and bool((labels.labels < 0).any()):
        raise Refused(f"{method.name} needs every label or none, and -1 marks an unknown one; the feature recovery subspace takes some")
    if (why := exposure.public.training.preconditioning()) and not (method.reads_any_update or _replays(method)):
        raise Refused(
            f"{method.name} reads gradients: {why}. rlu counts labels, embedding_rows lists tokens, and matching attacks replay the steps"
        )
    for need in sorted(method.needs):
        missing = _missing(need, exposure, labels, method.reads_closings)
        if missing:
            raise Refused(f"{method.name} needs {'the ' if need in NEEDS_WITH_ARTICLE else ''}{need.value}: {missing}")


def _replays(method: Method) -> bool:
    """Whether the method runs the client's training on guesses, whatever the optimiser."""
    return isinstance(method, Attack) and method.matches != "nothing"


def why_not_sent(exposure: Exposure, parameter: str, layer: str) -> str:
    """Why a parameter is not in the update: the client does not train it, as LoRA's frozen layers, or trains it and does not send it."""
    held = dict(exposure.model.named_parameters(remove_duplicate=False)).get(parameter)
    training = training_of_one_client(exposure.public.training)
    frozen = (held is not None and not held.requires_grad) or (isinstance(training, FedAvg) and training.freezes(parameter))
    return f"{layer} is frozen" if frozen else f"the client withholds {layer}"


def _missing(need: Knowledge, exposure: Exposure, labels: LabelEstimate | None, closings: bool) -> str:
    """Why `need` is not granted here, or nothing where it is."""
    public = exposure.public
    match need:
        case Knowledge.HEAD_GRADIENT:
            head = find_head(exposure, closings=closings)
            if not head.alone:
                return "the last layer shares its weight with another, and only the sum of their gradients is sent"
            if head.weight_gradient is None:
                return why_not_sent(exposure, parameter_name(exposure.model, head.name, "weight"), "the last layer")
        case Knowledge.BIAS_GRADIENT:
            head = find_head(exposure, closings=closings)
            if head.bias is None:
                return "the last layer has no bias; a bias-free method such as subspace would do"
            if head.bias_gradient is None:
                return why_not_sent(exposure, parameter_name(exposure.model, head.name, "bias"), "it")
        case Knowledge.BATCH_SIZE:
            if public.batch_size is None:
                return "the client does not declare it"
        case Knowledge.LABELS:
            if labels is None:
                return "pass labels=dm.recover_labels(exposure, ...) or a tensor"
        case Knowledge.AUXILIARY:
            if exposure.auxiliary is None:
                return "observe(..., auxiliary=dm.Batch(...)) grants it"
        case Knowledge.CANDIDATES:
            if exposure.candidates is None:
                return "dm.test_membership(exposure, candidates) takes them, and an audit has them from auxiliary samples"
        case Knowledge.SINGLE_SAMPLE:
            if public.batch_size != 1:
                return f"this batch has {public.batch_size or 'an unknown number of'} samples"
        case Knowledge.SOFTMAX_LOSS:
            if not public.loss.shift_invariant:
                return f"the client trains with {public.loss.said()}"
        case Knowledge.TAMPERED_MODEL:
            return ""  # the attack itself checks that the model bears its mark
    return ""
