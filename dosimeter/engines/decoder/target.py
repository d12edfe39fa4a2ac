"""The target model as a decoder's teacher: from images to the features that its head's gradient gives away."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, partial

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from dosimeter.artefacts import fingerprint
from dosimeter.data.pixels import square
from dosimeter.interfaces import Exposure
from dosimeter.network.head import locate_head
from dosimeter.network.probing import input_of, record_calls, samples_at_once
from dosimeter.normalization import from_pixels
from dosimeter.types import Normalization, Refused

TOGETHER = 256  # images that pass the model at once, at most, where their batches are smaller


@dataclass(frozen=True, kw_only=True)
class Target:
    """The model in the client's mode, and what of it a decoder depends on."""

    model: nn.Module  # a copy, frozen
    head: str
    feature_shape: tuple[int, int, int]
    image_shape: tuple[int, int, int]
    normalization: Normalization = field(default_factory=Normalization)

    @classmethod
    def of(cls, exposure: Exposure) -> Target:
        public = exposure.public
        return cls.from_model(exposure.model, public.input_shape, public.normalization)

    @classmethod
    def from_model(cls, model: nn.Module, input_shape: Sequence[int], normalization: Normalization) -> Target:
        if len(input_shape) != 3:
            raise Refused(f"a decoder draws images (channels, height, width); the model takes inputs of shape {tuple(input_shape)}")
        channels, height, width = input_shape
        head, _ = locate_head(model, tuple(input_shape))
        model = copy.deepcopy(model).requires_grad_(False)
        if torch.finfo(next(model.parameters()).dtype).bits < 32:
            model.float()  # a decoder is trained in single precision, behind features that half precision only rounds
        shape = _feature_shape(model, head, (channels, height, width))
        return cls(model=model, head=head, feature_shape=shape, image_shape=(channels, height, width), normalization=normalization)

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def train_mode(self) -> bool:
        return self.model.training

    @cached_property
    def _together(self) -> int:
        """How many images pass the model at once; on a CPU no more than its bounded memory allows."""
        if self.device.type != "cpu":
            return TOGETHER
        return min(TOGETHER, samples_at_once(self.model, self.images(torch.zeros(1, *self.image_shape))))

    def images(self, pixels: Tensor) -> Tensor:
        """Pixels in [0, 1] of any size as images of the model's size: (n, *image_shape)."""
        pixels = pixels.to(self.device, next(self.model.parameters()).dtype)
        height, width = self.image_shape[1:]
        if pixels.shape[-2:] == (height, width):
            return pixels
        if height != width:
            raise ValueError(f"auxiliary: expected images of {height}×{width} pixels, got {tuple(pixels.shape[-2:])}")
        return square(pixels, height)

    def features(self, images: Tensor, *, bfloat16: bool = False) -> Tensor:
        """What the head receives where these images (n, *image_shape) are one client's batch: (n, H)."""
        if len(images) == 1 and self.train_mode:  # batch norm takes no single sample; two alike have its statistics
            return self.features(images.expand(2, -1, -1, -1), bfloat16=bfloat16)[:1]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=bfloat16):
            return input_of(self.model, self.head, from_pixels(images, self.normalization))

    def features_in_batches(self, images: Tensor, size: int, *, bfloat16: bool = False) -> Tensor:
        """What the head receives where every `size` of these images are one client's batch: (n, H).

        Several batches pass at once, and in train mode batch norm sees each on its own; a rest that fills no batch passes apart, a
        single image with the batch before it.
        """
        rest = len(images) % size if self.train_mode else 0
        rest = min(len(images), size + 1) if rest == 1 else rest
        whole, last = images[: len(images) - rest], images[len(images) - rest :]
        together = max(size, self._together // size * size) if self.train_mode else self._together
        with _normalise_batches_apart(self.model, size):
            found = [self.features(piece, bfloat16=bfloat16) for piece in whole.split(together) if len(piece)]
        return torch.cat([*found, self.features(last, bfloat16=bfloat16)] if rest else found)

    def fingerprint(self) -> str:
        """Of all that a feature depends on: every weight but the head's, the running statistics in eval mode, and the scale of inputs."""
        parts: list[str | Tensor] = [repr((self.train_mode, self.feature_shape, self.image_shape, self.normalization))]
        own = {name for name, _ in self.model.named_parameters()}
        for name, tensor in self.model.state_dict().items():
            belongs_to_head = name.startswith(f"{self.head}.") or not self.head
            if not belongs_to_head and (name in own or not self.train_mode):
                parts += [name, tensor]
        return fingerprint(*parts)


def _feature_shape(model: nn.Module, head: str, image_shape: tuple[int, int, int]) -> tuple[int, int, int]:
    """(channels, height, width) of the last map that has as many entries as the head takes; (H, 1, 1) where there is none."""
    like = next(model.parameters())
    _, calls = record_calls(model, torch.zeros(2, *image_shape, device=like.device, dtype=like.dtype), lambda *_: True)
    entries = next(call.received for call in reversed(calls) if call.name == head).shape[1]
    for shape in (tuple(call.given.shape) for call in reversed(calls)):
        if shape[0] == 2 and len(shape) == 4 and shape[1] * shape[2] * shape[3] == entries:
            return shape[1], shape[2], shape[3]
    return entries, 1, 1


@contextmanager
def _normalise_batches_apart(model: nn.Module, size: int) -> Iterator[None]:
    """Batch norm, for as long as this lasts, takes its statistics over every `size` samples on their own."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.training]
    for norm in norms:
        norm.forward = partial(_normalise_apart, norm, size)
    try:
        yield
    finally:
        for norm in norms:
            del norm.forward


def _normalise_apart(norm: _BatchNorm, size: int, input: Tensor) -> Tensor:
    """(n, channels, ...) with the mean and variance of each `size` samples: what batch norm gives one batch after the other."""
    precise = input.to(torch.promote_types(input.dtype, torch.float32))
    batches = precise.unflatten(0, (-1, size))  # (n / size, size, channels, ...)
    variance, mean = torch.var_mean(batches, [1, *range(3, batches.ndim)], correction=0, keepdim=True)
    scale = (variance + norm.eps).rsqrt()
    offset = -mean * scale
    if norm.affine:
        weight, bias = (tensor.reshape(-1, *[1] * (batches.ndim - 3)) for tensor in (norm.weight, norm.bias))
        scale, offset = scale * weight, offset * weight + bias
    return torch.addcmul(offset, batches, scale).to(input.dtype).flatten(0, 1)
