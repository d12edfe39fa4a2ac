"""Training a decoder: auxiliary images go through the frozen target model, and the decoder learns the way back."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.artefacts import CheckpointFile
from dosimeter.engines.decoder.losses import fine_tuning, perceptual_reason, squared_error
from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.training_set import FeatureBatch, TrainingSet, too_late
from dosimeter.progress import advance
from dosimeter.randomness import generator
from dosimeter.types import Refused

WARM_UP = 0.05  # of the steps, over which the step size rises
FEWEST = 8  # auxiliary images that teach anything


@dataclass(frozen=True, kw_only=True)
class TrainedDecoder:
    """What was learned, and at what cost."""

    decoder: Decoder  # in eval mode
    error: float  # the mean squared error over the last epoch
    seconds: float
    notes: tuple[str, ...]


def train_decoder(
    target: Target,
    pixels: Tensor,
    settings: DecoderSettings,
    keep: CheckpointFile | None = None,
    *,
    start: Decoder | None = None,
    compiled: bool = False,
) -> TrainedDecoder:
    """A decoder for `target`'s features, from auxiliary pixels (N, channels, height, width) of any size.

    After every epoch the state goes to `keep`, from which a killed training resumes to the same bits on a CPU. `start` is a
    decoder of the same shape to go on from; `compiled` spends a minute on compilation first.
    """
    if pixels.ndim != 4 or pixels.shape[1] != target.image_shape[0]:
        raise ValueError(f"auxiliary: expected images of {target.image_shape[0]} channels, got samples of shape {tuple(pixels.shape[1:])}")
    if len(pixels) < FEWEST:
        raise Refused(f"a decoder cannot be trained on {len(pixels)} auxiliary images; {FEWEST} are the least")
    session = _Session(target, pixels, settings, start, compiled)
    first = session.resume(keep)
    for epoch in range(first, session.epochs):
        session.run(epoch)
        if session.out_of_time():
            break
        if keep is not None and keep.due and epoch + 1 < session.epochs:
            keep.save(session.state(), {"epoch": str(epoch + 1)})
    session.note_what_was_cut()
    if math.isnan(session.error):
        raise Refused(f"the decoder's training left the finite numbers; try a smaller learning_rate than {settings.learning_rate:g}")
    if math.isinf(session.error):
        if settings.seconds is None:
            raise Refused(f"decoder.batch_size: batches of {settings.batch_size} leave the training without a step")
        raise Refused(too_late(len(pixels)))
    if keep is not None:
        keep.remove()
    return TrainedDecoder(
        decoder=session.decoder.eval().requires_grad_(False),
        error=session.error,
        seconds=session.elapsed,
        notes=session.notes,
    )


class _Session:
    """A decoder and its optimiser in motion."""

    def __init__(self, target: Target, pixels: Tensor, settings: DecoderSettings, start: Decoder | None, compiled: bool) -> None:
        self.began, self.spent = time.monotonic(), 0.0
        self.target, self.settings, self.compiled = target, settings, compiled
        self.cuda = target.device.type == "cuda"
        self.bfloat16 = settings.precision == "bf16" or (settings.precision == "auto" and self.cuda)
        if self.cuda:
            target.model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
        self.training_set = TrainingSet(
            out_of_time=self.out_of_time,
            target=target,
            pixels=pixels,
            client_batch_sizes=settings.client_batch_sizes,
            mirrored=settings.mirrored,
            mosaics=settings.mosaics,
            sharpened=settings.sharpened,
            coloured=settings.coloured,
            bfloat16=self.bfloat16,
            seed=settings.seed,
            rounds=-(-(settings.epochs + settings.fine_tuning_epochs) // settings.reuse),
        )
        self.epochs = settings.epochs + settings.fine_tuning_epochs
        self.steps_each = sum(
            math.ceil(len(part) / settings.batch_size) for part in torch.arange(len(pixels)).split(self.training_set.capacity)
        )
        self.decoder = self._decoder(start)
        self.optimizer = torch.optim.Adam(self.decoder.parameters(), lr=settings.learning_rate, fused=self.cuda)
        reason = perceptual_reason(target.image_shape) if settings.fine_tuning_epochs else None
        self.perceptual = reason is None
        self.notes = () if reason is None else (f"fine-tuned without LPIPS: {reason}",)
        self.step = 0
        self.error = math.inf
        self._kept: tuple[int, FeatureBatch] | None = None
        self._losses: dict[bool, Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]] = {}

    def _decoder(self, start: Decoder | None) -> Decoder:
        with _draw_from_seed(self.settings.seed):
            decoder = Decoder(self.settings.shape_for(self.target)).to(self.target.device)
        if start is None:
            decoder.standardise(self.training_set.sample())
        else:
            decoder.load_state_dict(start.state_dict())
        return decoder.to(memory_format=torch.channels_last) if self.cuda else decoder  # pyright: ignore[reportCallIssue]

    @property
    def progress(self) -> float:
        """Of the whole training, by the steps or by the clock, whichever is ahead."""
        done = (self.step + 1) / (self.epochs * self.steps_each)
        seconds = self.settings.seconds
        return done if seconds is None else max(done, self.elapsed / seconds)

    def out_of_time(self) -> bool:
        return self.settings.seconds is not None and self.elapsed > self.settings.seconds

    def note_what_was_cut(self) -> None:
        whole = self.epochs * self.steps_each
        if self.out_of_time() and self.step < whole:
            self.notes += (f"its training was cut at {self.settings.seconds:g} s, after {self.step} of {whole} steps",)

    @property
    def elapsed(self) -> float:
        return self.spent + time.monotonic() - self.began

    def run(self, epoch: int) -> None:
        """Every image once, with features drawn anew every `reuse` epochs, as long as there is time."""
        settings = self.settings
        rng = generator(settings.seed, f"decoder epoch {epoch}")
        self.step = epoch * self.steps_each
        self.decoder.train()
        total, seen = torch.zeros((), device=self.target.device), 0
        parts = (
            (batch, chosen) for batch in self.feature_batches(epoch) for chosen in _split(len(batch.features), settings.batch_size, rng)
        )
        for batch, chosen in parts:
            progress = self.progress
            if progress > 1:
                break
            tuning = progress > settings.epochs / self.epochs
            if len(chosen) > 1:  # batch norm cannot train on one
                total += len(chosen) * self._improve(*batch.select(chosen), tuning, _rate(progress))
                seen += len(chosen)
            self.step += 1
            advance(self.step, self.epochs * self.steps_each, "fine-tuning the decoder" if tuning else "training the decoder")
        if seen:
            self.error = float(total) / seen

    def feature_batches(self, epoch: int) -> Iterator[FeatureBatch]:
        """The auxiliary images with their features, as many at a time as are held; all at once, they are kept for `reuse` epochs."""
        first = epoch - epoch % self.settings.reuse
        if self._kept is not None and self._kept[0] == first:
            yield self._kept[1]
            return
        self._kept = None
        for batch in self.training_set.feature_batches(first):
            if len(batch.features) == len(self.training_set.pixels):
                self._kept = (first, batch)
            yield batch

    def _improve(self, features: Tensor, images: Tensor, tuning: bool, rate: float) -> Tensor:
        """One step of Adam; the squared error before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.settings.learning_rate * rate
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

    def state(self) -> dict[str, Tensor]:
        moments = self.optimizer.state_dict()["state"]
        kept = {f"decoder {name}": tensor for name, tensor in self.decoder.state_dict().items()}
        kept |= {"elapsed": torch.tensor(self.elapsed), "error": torch.tensor(self.error)}
        return kept | {f"adam {index} {name}": torch.as_tensor(value) for index, part in moments.items() for name, value in part.items()}

    def resume(self, keep: CheckpointFile | None) -> int:
        """Go on after the last whole epoch of an earlier run; the number of the epoch to begin with."""
        found = keep.load() if keep is not None else None
        if found is None:
            return 0
        tensors, facts = found
        weights = {name[8:]: tensor for name, tensor in tensors.items() if name.startswith("decoder ")}
        own = self.decoder.state_dict()
        if {name: tensor.shape for name, tensor in weights.items()} != {name: tensor.shape for name, tensor in own.items()}:
            return 0  # left by another version
        self.spent, self.error = float(tensors["elapsed"]), float(tensors["error"])
        self.decoder.load_state_dict(weights)
        moments: dict[int, dict[str, Tensor]] = {}
        for key, tensor in tensors.items():
            if key.startswith("adam "):
                _, index, name = key.split(" ", 2)
                moments.setdefault(int(index), {})[name] = tensor
        self.optimizer.load_state_dict({"state": moments, "param_groups": self.optimizer.state_dict()["param_groups"]})
        return int(facts["epoch"])


def decode(decoder: Decoder, features: Tensor, piece: int = 64) -> Tensor:
    """Pixels in [0, 1] of features (n, H), in pieces that fit into memory: (n, *image)."""
    like = next(decoder.parameters())
    return torch.cat([decoder(part.to(like)) for part in features.split(piece)])


def decode_without_slope(decoder: Decoder, features: Tensor) -> Tensor:
    with torch.no_grad():
        return decode(decoder, features)


def _split(count: int, size: int, rng: Generator) -> tuple[Tensor, ...]:
    """The numbers below `count` in random order, in parts."""
    return torch.randperm(count, generator=rng).split(size)


def _rate(progress: float) -> float:
    """A straight rise, then half a cosine down to nothing."""
    return progress / WARM_UP if progress < WARM_UP else 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))


@contextmanager
def _draw_from_seed(seed: int) -> Iterator[None]:
    """PyTorch's own initialisation, from our seed; the caller's random state is put back."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator(seed, "decoder weights").initial_seed())
        yield
