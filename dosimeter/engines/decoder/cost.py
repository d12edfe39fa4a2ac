"""What the training of a decoder takes, told before it starts: seconds of one core, and memory."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.training_set import MOMENTS
from dosimeter.files import readable_size
from dosimeter.memory import MEMORY_VARIABLE, spare_memory
from dosimeter.network.operations import FLOPS_A_SECOND, forward_flops
from dosimeter.network.probing import activation_bytes

PASSES = 3  # of a step: forward, and backward to activations and to weights
SECONDS_A_BYTE = 2e-9  # of activations, which a step writes and reads again several times
ACTIVATION_COPIES, WEIGHT_COPIES = 1.4, 4  # held at the peak of a step: with their gradients and what Adam keeps


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Counts, so that they are the same on every machine; only the order of magnitude matters."""

    features: float  # seconds of one core for the features of the auxiliary images
    epoch: float  # seconds of one core for one epoch of the decoder
    memory: float  # bytes of one step

    def seconds(self, epochs: int) -> float:
        return self.features + epochs * self.epoch


def training_cost(target: Target, images: int, settings: DecoderSettings) -> Cost:
    """What a training on so many auxiliary images takes, without doing it."""
    with torch.device("meta"):
        decoder = Decoder(settings.shape_for(target))
        feature = torch.zeros(1, decoder.shape.feature[0] * decoder.shape.feature[1] * decoder.shape.feature[2])
    held = activation_bytes(decoder, feature)  # by one image
    drawing = PASSES * (forward_flops(decoder, feature) or 0.0) / FLOPS_A_SECOND + SECONDS_A_BYTE * held
    like = next(target.model.parameters())
    passing = (forward_flops(target.model, torch.zeros(1, *target.image_shape).to(like)) or 0.0) / FLOPS_A_SECOND
    rounds = -(-(settings.epochs + settings.fine_tuning_epochs) // settings.reuse)
    varied = target.train_mode or settings.mosaics or settings.sharpened or settings.coloured
    passes = images * (rounds if varied else min(rounds, 2)) + min(images, MOMENTS)  # straight and mirrored, once, where they repeat
    weights = sum(parameter.nbytes for parameter in decoder.parameters())
    memory = ACTIVATION_COPIES * min(settings.batch_size, images) * held + WEIGHT_COPIES * weights
    return Cost(features=passes * passing, epoch=images * drawing, memory=memory)


def memory_lacking(target: Target, images: int, settings: DecoderSettings) -> str:
    """Why the training does not fit into memory, "" where it does."""
    if target.device.type != "cpu":
        return ""
    needed, free = training_cost(target, images, settings).memory, spare_memory()
    if needed <= free:
        return ""
    smaller = f"a smaller width or batch_size takes less, and {MEMORY_VARIABLE}=GB sets the limit of a run"
    return f"training the decoder needs about {readable_size(needed)} of memory, {readable_size(free)} are free; {smaller}"
