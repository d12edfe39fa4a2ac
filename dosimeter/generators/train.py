"""Training a decoder: auxiliary images go through the frozen target model, and the decoder learns the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Generator, Tensor

from dosimeter.generators.decoder import Decoder, Shape, default_width
from dosimeter.generators.losses import fine_tuning, perceptual_reason, squared_error
from dosimeter.generators.progress_file import ProgressFile
from dosimeter.generators.target import Target, client_batches
from dosimeter.options import Fraction, NonNegativeInt, PositiveFloat, PositiveInt, check_fields
from dosimeter.progress import advance
from dosimeter.randomness import generator
from dosimeter.types import Refused

HELD = {"cpu": 2**28, "cuda": 2**33}  # bytes of features that are computed and then trained on, before the next are
WARM_UP = 0.05  # of the steps, over which the step size rises
FEWEST = 8  # auxiliary images that teach anything


@dataclass(frozen=True, kw_only=True)
class DecoderSettings:
    """How a decoder is built and trained; part of the key under which it is kept.

    Xue et al. train 30 epochs of Adam at 1e-4 on the squared error in batches of 24; RGLA goes on with −PSNR + 10 (1 − SSIM) +
    10 LPIPS. Departures: a larger step size that rises and falls, mirrored images besides, and batches of several sizes for the
    target's batch norm, since the client's is unknown.
    """

    width: PositiveInt | None = None  # channels of the first stage; none: by the size of the images, 512 at 128 pixels and more
    epochs: PositiveInt = 30
    fine_tuning_epochs: NonNegativeInt = 0
    batch_size: PositiveInt = 24
    learning_rate: PositiveFloat = 1e-3
    client_batch_sizes: tuple[PositiveInt, ...] = (8, 16, 32, 64)  # drawn from, where the client trains in train mode
    mirrored: bool = True
    mosaics: Fraction = 0.0  # share of images that are four of them side by side, with finer detail than a small one scaled up has
    reuse: PositiveInt = 1  # epochs that the same features are trained on, where all of them fit into memory
    precision: Literal["auto", "fp32", "bf16"] = "auto"  # auto: bf16 on a GPU
    seed: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.client_batch_sizes:
            raise ValueError("client_batch_sizes: expected at least one")


@dataclass(frozen=True, kw_only=True)
class Lesson:
    """What was learned, and at what cost."""

    decoder: Decoder  # in eval mode
    error: float  # the mean squared error over the last epoch
    seconds: float
    notes: tuple[str, ...]


def train_decoder(
    target: Target,
    pixels: Tensor,
    settings: DecoderSettings,
    keep: ProgressFile | None = None,
    *,
    start: Decoder | None = None,
    compiled: bool = False,
) -> Lesson:
    """A decoder for `target`'s features, from auxiliary pixels (N, channels, height, width) of any size.

    After every epoch the state goes to `keep`, from which a killed training resumes to the same bits on a CPU. `start` is a
    decoder of the same shape to go on from; `compiled` spends a minute on compilation first.
    """
    if pixels.ndim != 4 or pixels.shape[1] != target.image_shape[0]:
        raise ValueError(f"auxiliary: expected images of {target.image_shape[0]} channels, got samples of shape {tuple(pixels.shape[1:])}")
    if len(pixels) < FEWEST:
        raise Refused(f"a decoder cannot be trained on {len(pixels)} auxiliary images; {FEWEST} are the least")
    began = time.monotonic()
    session = _Session(target, pixels, settings, start, compiled)
    first = session.resume(keep)
    for epoch in range(first, session.epochs):
        session.run(epoch)
        if keep is not None and epoch + 1 < session.epochs:
            keep.save(session.state(), epoch + 1)
    if keep is not None:
        keep.remove()
    return Lesson(
        decoder=session.decoder.eval().requires_grad_(False),
        error=session.error,
        seconds=time.monotonic() - began,
        notes=session.notes,
    )


class _Lot(NamedTuple):
    """Auxiliary images whose features are at hand."""

    indices: Tensor  # (n,) of the images, on the CPU
    turned: Tensor  # (n,) bool: mirrored
    tiles: Tensor  # (n, 4) indices of the four images that make a mosaic in the image's place, −1 where none does
    features: Tensor  # (n, H)


class _Session:
    """A decoder and its optimiser in motion."""

    def __init__(self, target: Target, pixels: Tensor, settings: DecoderSettings, start: Decoder | None, compiled: bool) -> None:
        self.target, self.pixels, self.settings, self.compiled = target, pixels, settings, compiled
        self.cuda = target.device.type == "cuda"
        self.bfloat16 = settings.precision == "bf16" or (settings.precision == "auto" and self.cuda)
        self.epochs = settings.epochs + settings.fine_tuning_epochs
        self.steps_each = sum(math.ceil(len(part) / settings.batch_size) for part in torch.arange(len(pixels)).split(self.held()))
        shape = Shape(feature=target.feature_shape, image=target.image_shape, width=settings.width or default_width(target.image_shape))
        with _drawn_from(settings.seed):
            self.decoder = Decoder(shape).to(target.device)
        if start is None:
            self.decoder.standardise(self._sample())
        else:
            self.decoder.load_state_dict(start.state_dict())
        if self.cuda:
            self.decoder.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
            target.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.optimizer = torch.optim.Adam(self.decoder.parameters(), lr=settings.learning_rate, fused=self.cuda)
        reason = perceptual_reason(target.image_shape) if settings.fine_tuning_epochs else None
        self.perceptual = reason is None
        self.notes = () if reason is None else (f"fine-tuned without LPIPS: {reason}",)
        self.step = 0
        self.error = math.inf
        self._kept: tuple[int, _Lot] | None = None
        self._losses: dict[bool, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def held(self) -> int:
        """How many images' features are held at once."""
        entries = math.prod(self.target.feature_shape) * (2 if self.bfloat16 else 4)
        size = HELD.get(self.target.device.type, HELD["cpu"]) // entries
        return max(1, min(len(self.pixels), max(size, max(self.settings.client_batch_sizes))))

    def run(self, epoch: int) -> None:
        """Every image once, mirrored at random, in client batches drawn anew every `reuse` epochs."""
        settings = self.settings
        tuning = epoch >= settings.epochs
        rng = generator(settings.seed, f"decoder epoch {epoch}")
        self.step = epoch * self.steps_each
        self.decoder.train()
        total = torch.zeros((), device=self.target.device)
        for lot in self.lots(epoch):
            for chosen in torch.randperm(len(lot.indices), generator=rng).split(settings.batch_size):
                if len(chosen) > 1:  # batch norm cannot train on one
                    total += len(chosen) * self._improve(lot.features[chosen.to(lot.features.device)], self.images(lot, chosen), tuning)
                self.step += 1
                advance(self.step, self.epochs * self.steps_each, "fine-tuning the decoder" if tuning else "training the decoder")
        self.error = float(total) / len(self.pixels)

    def lots(self, epoch: int) -> Iterator[_Lot]:
        """The auxiliary images with their features, as many at a time as are held; all at once, they are kept for `reuse` epochs."""
        first = epoch - epoch % self.settings.reuse
        if self._kept is not None and self._kept[0] == first:
            yield self._kept[1]
            return
        rng = generator(self.settings.seed, f"decoder features {first}")
        self._kept = None
        for part in torch.randperm(len(self.pixels), generator=rng).split(self.held()):
            turned = torch.rand(len(part), generator=rng) < (0.5 if self.settings.mirrored else 0.0)
            lot = _Lot(part, turned, self._tiles(len(part), rng), torch.empty(0))
            sizes = client_batches(len(part), self.settings.client_batch_sizes, rng)
            pieces = [
                self.target.features(self.images(lot, piece), bfloat16=self.bfloat16) for piece in torch.arange(len(part)).split(sizes)
            ]
            lot = lot._replace(features=torch.cat(pieces))
            if len(part) == len(self.pixels):
                self._kept = (first, lot)
            yield lot

    def images(self, lot: _Lot, chosen: Tensor) -> Tensor:
        """Some of a lot's images, at the model's size."""
        images = self.target.images(self.pixels[lot.indices[chosen].to(self.pixels.device)])
        tiled = (lot.tiles[chosen, 0] >= 0).nonzero()[:, 0]
        if len(tiled):
            images = images.clone()
            images[tiled.to(images.device)] = self.target.images(_mosaic(self.pixels[lot.tiles[chosen[tiled]].to(self.pixels.device)]))
        turned = lot.turned[chosen].to(images.device)
        return torch.where(turned[:, None, None, None], images.flip(-1), images)

    def _tiles(self, count: int, rng: Generator) -> Tensor:
        """Which of `count` images are mosaics, and of what: (count, 4)."""
        drawn = torch.randint(len(self.pixels), (count, 4), generator=rng)
        return torch.where(torch.rand(count, 1, generator=rng) < self.settings.mosaics, drawn, -1)

    def _improve(self, features: Tensor, images: Tensor, tuning: bool) -> Tensor:
        """One step of Adam; the squared error before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * _rate(self.step, self.epochs * self.steps_each)
        self.optimizer.zero_grad(set_to_none=True)
        loss, error = self._loss(tuning)(features, images)
        loss.backward()
        self.optimizer.step()
        return error.detach()

    def _loss(self, tuning: bool) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        if tuning not in self._losses:

            def loss(features: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
                with torch.autocast(images.device.type, torch.bfloat16, enabled=self.bfloat16):
                    drawn = self.decoder(features)
                error = squared_error(drawn.to(images.dtype), images)
                return (fine_tuning(drawn.to(images.dtype), images, perceptual=self.perceptual) if tuning else error), error

            self._losses[tuning] = torch.compile(loss) if self.compiled else loss  # pyright: ignore[reportArgumentType]
        return self._losses[tuning]

    def _sample(self) -> Tensor:
        """Features of enough auxiliary images to take their moments."""
        rng = generator(self.settings.seed, "decoder moments")
        chosen = torch.randperm(len(self.pixels), generator=rng)[: min(self.held(), 512)]
        images = self.target.images(self.pixels[chosen.to(self.pixels.device)])
        return self.target.grouped_features(images, self.settings.client_batch_sizes, rng)

    def state(self) -> dict[str, Tensor]:
        moments = self.optimizer.state_dict()["state"]
        kept = {f"decoder {name}": tensor for name, tensor in self.decoder.state_dict().items()}
        return kept | {f"adam {index} {name}": torch.as_tensor(value) for index, part in moments.items() for name, value in part.items()}

    def resume(self, keep: ProgressFile | None) -> int:
        """Go on after the last whole epoch of an earlier run; the number of the epoch to begin with."""
        found = keep.load() if keep is not None else None
        if found is None:
            return 0
        tensors, epoch = found
        self.decoder.load_state_dict({name[8:]: tensor for name, tensor in tensors.items() if name.startswith("decoder ")})
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("adam "):
                _, index, name = key.split(" ", 2)
                moments.setdefault(int(index), {})[name] = tensor
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        return epoch


def decode(decoder: Decoder, features: Tensor, piece: int = 64) -> Tensor:
    """Pixels in [0, 1] of features (n, H), in pieces that fit into memory: (n, *image)."""
    like = next(decoder.parameters())
    return torch.cat([decoder(part.to(like)) for part in features.split(piece)])


def decode_without_slope(decoder: Decoder, features: Tensor) -> Tensor:
    with torch.no_grad():
        return decode(decoder, features)


def _mosaic(pixels: Tensor) -> Tensor:
    """(n, 4, channels, height, width) -> (n, channels, 2 height, 2 width)."""
    rows = [torch.cat([pixels[:, left], pixels[:, left + 1]], 3) for left in (0, 2)]
    return torch.cat(rows, 2)


def _rate(step: int, steps: int) -> float:
    """A straight rise, then half a cosine down to nothing."""
    progress = (step + 1) / steps
    return progress / WARM_UP if progress < WARM_UP else 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


@contextmanager
def _drawn_from(seed: int) -> Iterator[None]:
    """PyTorch's own initialisation, from our seed; the caller's random state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "decoder weights").initial_seed())
        yield
