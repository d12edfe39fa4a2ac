"""What a decoder learns from: auxiliary images, varied, beside the features that they have in a client's batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import avg_pool2d, max_pool2d

from dosimeter.engines.decoder.target import Target
from dosimeter.randomness import generator
from dosimeter.types import Refused

HELD = 2**29  # bytes of features and images that are computed and then trained on, before the next are; of a GPU's memory, a quarter
MOMENTS = 512  # images that the features' moments are taken from, at most


def too_late(images: int) -> str:
    """Why a training that is limited in time gave nothing."""
    return f"the decoder's time was over before its first step: the features of {images} auxiliary images take longer; grant more seconds"


class FeatureBatch(NamedTuple):
    """Images whose features are at hand."""

    features: Tensor  # (n, H)
    images: Tensor  # (n, *image), as levels 0..255

    def select(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and pixels in [0, 1]."""
        chosen = chosen.to(self.features.device)
        return self.features[chosen], self.images[chosen].float() / 255


@dataclass(frozen=True, kw_only=True)
class TrainingSet:
    """Auxiliary pixels, and how they are varied before the target sees them."""

    target: Target
    pixels: Tensor  # (N, channels, height, width) in [0, 1], of any size
    client_batch_sizes: tuple[int, ...]  # each holds as many images, where batch norm mixes a batch
    mirrored: bool
    mosaics: float
    sharpened: float
    coloured: float
    bfloat16: bool
    seed: int
    rounds: int = 1  # times that all images are asked for
    out_of_time: Callable[[], bool] = lambda: False  # asked before every pass through the target

    @cached_property
    def capacity(self) -> int:
        """How many images are at hand at once."""
        entries = math.prod(self.target.feature_shape) * (2 if self.bfloat16 else 4) + math.prod(self.target.image_shape)
        return max(1, min(len(self.pixels), max(self._memory // entries, self.together)))

    @property
    def _memory(self) -> int:
        device = self.target.device
        return torch.cuda.get_device_properties(device).total_memory // 4 if device.type == "cuda" else HELD

    @property
    def together(self) -> int:
        """How many images pass the target at once."""
        return max(self.client_batch_sizes)

    def feature_batches(self, number: int) -> Iterator[FeatureBatch]:
        """All images once, in an order and with variations that `number` decides, as long as there is time."""
        rng = generator(self.seed, f"decoder features {number}")
        for part in torch.randperm(len(self.pixels), generator=rng).split(self.capacity):
            batch: FeatureBatch | None = None
            filled = 0
            for chosen in part.split(self.together):
                if self.out_of_time():
                    return
                piece = self._piece(chosen, rng)
                if batch is None:  # all at once, since pieces that are joined later take twice the memory
                    batch = FeatureBatch(*(tensor.new_empty(len(part), *tensor.shape[1:]) for tensor in piece))
                for whole, tensor in zip(batch, piece):
                    whole[filled : filled + len(chosen)] = tensor
                filled += len(chosen)
            assert batch is not None
            yield batch

    def sample(self) -> Tensor:
        """Features of enough images to take their moments."""
        rng = generator(self.seed, "decoder moments")
        chosen = torch.randperm(len(self.pixels), generator=rng)[: min(self.capacity, MOMENTS)]
        found = []
        for piece in chosen.split(self.together):
            self._refuse_if_late()
            found.append(self._piece(piece, rng).features)
        return torch.cat(found)

    def _refuse_if_late(self) -> None:
        if self.out_of_time():
            raise Refused(too_late(len(self.pixels)))

    def _piece(self, chosen: Tensor, rng: Generator) -> FeatureBatch:
        """Some images in client batches of one size and one kind."""
        images, turned = self.augment(chosen, rng)
        size = self.client_batch_sizes[int(torch.randint(len(self.client_batch_sizes), (), generator=rng))]
        if self._repeats:
            features = self._both_ways[turned.long(), chosen].to(images.device)
        else:
            features = self._features(images, size)
        return FeatureBatch(features, (255 * images).round_().to(torch.uint8))

    def _features(self, images: Tensor, size: int) -> Tensor:
        features = self.target.features_in_batches(images, size, bfloat16=self.bfloat16)
        return features.bfloat16() if self.bfloat16 else features

    @cached_property
    def _repeats(self) -> bool:
        """Whether an image has the same features in every round, straight or mirrored, so that they are computed once and held."""
        if any(module.training for module in self.target.model.modules()) or self.mosaics or self.sharpened or self.coloured:
            return False
        held = 2 * len(self.pixels) * math.prod(self.target.feature_shape) * 4
        return self.rounds > 2 and held <= self._memory

    @cached_property
    def _both_ways(self) -> Tensor:
        """The features of all images, straight and mirrored: (2, N, H), or (1, N, H) where none is mirrored."""
        parts = torch.arange(len(self.pixels)).split(self.together)
        ways = []
        for turned in (False, True) if self.mirrored else (False,):
            found = []
            for part in parts:
                self._refuse_if_late()
                images = self.target.images(self.pixels[part.to(self.pixels.device)])
                found.append(self._features(images.flip(-1) if turned else images, self.together))
            ways.append(torch.cat(found))
        return torch.stack(ways).cpu()

    def augment(self, chosen: Tensor, rng: Generator) -> tuple[Tensor, Tensor]:
        """Images of the model's size, all of one kind, as a client's are; and which of them are mirrored (n,).

        The kinds are plain, mosaics, sharpened and coloured.
        """
        mosaics, sharpened, coloured = (
            torch.rand((3,), generator=rng) < torch.tensor([self.mosaics, self.sharpened, self.coloured])
        ).tolist()
        turned = torch.rand(len(chosen), generator=rng) < (0.5 if self.mirrored else 0.0)
        if mosaics:
            tiles = torch.randint(len(self.pixels), (len(chosen), 4), generator=rng)
            images = self.target.images(_mosaic(self.pixels[tiles.to(self.pixels.device)]))
            shifts = [int(torch.randint(side, (), generator=rng)) for side in images.shape[2:]]
            images = images.roll(shifts, (2, 3))  # or the decoder expects seams in the middle of any image
        else:
            images = self.target.images(self.pixels[chosen.to(self.pixels.device)])
        if sharpened:
            images = _sharpen(images)
        if coloured:
            images = _colour(images, rng)
        return torch.where(turned[:, None, None, None].to(images.device), images.flip(-1), images), turned


def _mosaic(pixels: Tensor) -> Tensor:
    """(n, 4, channels, height, width) -> (n, channels, 2 height, 2 width)."""
    rows = [torch.cat([pixels[:, left], pixels[:, left + 1]], 3) for left in (0, 2)]
    return torch.cat(rows, 2)


def _sharpen(images: Tensor, steps: int = 4, reach: int = 3) -> Tensor:
    """Edges made steep: away from the local mean, never beyond the local extremes, so that no halo appears."""
    side = 2 * reach + 1
    for _ in range(steps):
        blurred = avg_pool2d(images, side + 2, 1, reach + 1, count_include_pad=False)
        highest, lowest = max_pool2d(images, side, 1, reach), -max_pool2d(-images, side, 1, reach)
        images = (2 * images - blurred).clamp(lowest, highest)
    return images


def _colour(images: Tensor, rng: Generator) -> Tensor:
    """Each image's colours from none to three times as strong, its channels in any order."""
    strength = 3 * torch.rand(len(images), 1, 1, 1, generator=rng).to(images)
    order = torch.rand(images.shape[:2], generator=rng).argsort(1).to(images.device)
    gray = images.mean(1, keepdim=True)
    return (gray + strength * (images - gray)).clamp(0, 1).gather(1, order[:, :, None, None].expand_as(images))
