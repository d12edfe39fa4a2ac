"""Learning to Invert: a network that maps updates to the samples behind them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor, nn
from torch.nn.utils import skip_init

from dosimeter.client.training import FedAvg
from dosimeter.interfaces import Attack, Exposure
from dosimeter.normalization import from_pixels, to_pixels
from dosimeter.options import PositiveFloat, PositiveInt
from dosimeter.progress import advance
from dosimeter.randomness import global_seed
from dosimeter.registry import ATTACKS
from dosimeter.types import Batch, Knowledge, LabelEstimate, Outcome, Reconstruction, Refused, Update

LARGEST_BATCH = 16  # samples; above, the network has too many outputs for the auxiliary samples at hand
LEAST_SAMPLES = 20  # auxiliary samples
HELD_OUT = 0.1  # share of the simulated updates that tell when to stop


@ATTACKS.register("learning_to_invert")
@dataclass(frozen=True, kw_only=True)
class LearningToInvert(Attack):
    """Trains a network on updates that the server simulates with its own samples, and reads the private samples off the client's update.

    Wu et al., "Learning to Invert: Simple Adaptive Attacks for Gradient Inversion in Federated Learning", UAI 2023 (thesis Section 2.2): a
    perceptron with two hidden layers, the squared error, permutations of a batch counted as equal, and hashed updates where a model is
    large. The hash adds entries of random signs up in `entries` sums. A picture's label is that of the auxiliary sample nearest to it.
    Departures: training stops by held-out simulations. The updates are simulated without the client's defenses. The auxiliary samples
    are few, where the paper has a whole training set.
    """

    needs: ClassVar[frozenset[Knowledge]] = frozenset({Knowledge.AUXILIARY, Knowledge.BATCH_SIZE})
    quick: ClassVar[dict[str, Any]] = {"simulations": 400, "epochs": 20, "hidden": 256}

    simulations: PositiveInt = 4000
    epochs: PositiveInt = 60
    hidden: PositiveInt = 1000
    entries: PositiveInt = 2048
    learning_rate: PositiveFloat = 1e-3

    def __call__(self, exposure: Exposure, labels: LabelEstimate | None, rng: Generator) -> Reconstruction:
        size, auxiliary = exposure.public.batch_size, exposure.auxiliary
        assert size is not None
        assert auxiliary is not None
        if size > LARGEST_BATCH:
            raise Refused(f"learning_to_invert needs a batch of at most {LARGEST_BATCH} samples; this batch has {size}")
        if len(auxiliary.inputs) < max(LEAST_SAMPLES, size):
            raise Refused(f"learning_to_invert needs at least {max(LEAST_SAMPLES, size)} auxiliary samples, got {len(auxiliary.inputs)}")
        hashed = _Hash.draw(exposure.update, self.entries, rng)
        sketches, truths = _simulate(exposure, auxiliary, hashed, self.simulations, size, rng)  # (N, entries), (N, B, *shape)
        mean, deviation = sketches.mean(0), sketches.std(0).clamp_min(1e-12)
        network, error = self._train((sketches - mean) / deviation, truths, rng)
        with torch.no_grad():
            pixels = network((hashed(exposure.update) - mean) / deviation).reshape(truths.shape[1:]).clamp(0, 1)
        inputs = from_pixels(pixels, exposure.public.normalization).to(auxiliary.inputs)
        nearest = torch.cdist(inputs.flatten(1), auxiliary.inputs.flatten(1)).argmin(1)
        return Reconstruction(
            inputs=inputs,
            labels=auxiliary.targets[nearest],
            objective=error,
            normalization=exposure.public.normalization,
            outcome=Outcome.COMPLETED if math.isfinite(error) else Outcome.DIVERGED,
        )

    def local_steps(self, exposure: Exposure) -> float:
        """How many steps on a batch as large as the client's one simulated client takes."""
        training, size = exposure.public.training, exposure.public.batch_size
        if not isinstance(training, FedAvg) or not size:
            return 1.0
        return (training.local_batches(size) or 1) * min(training.mini_batch or size, size) / size

    def _train(self, sketches: Tensor, truths: Tensor, rng: Generator) -> tuple[nn.Module, float]:
        """The network of the lowest held-out error, and that error."""
        network = _perceptron(self.entries, self.hidden, truths[0].numel(), rng).to(sketches)
        held = max(1, int(HELD_OUT * len(sketches)))
        optimiser = torch.optim.Adam(network.parameters(), lr=self.learning_rate)
        best, lowest = {name: value.clone() for name, value in network.state_dict().items()}, math.inf
        for epoch in range(self.epochs):
            order = held + torch.randperm(len(sketches) - held, generator=rng, device=rng.device).to(sketches.device)
            with torch.enable_grad():
                for chosen in order.split(64):
                    optimiser.zero_grad()
                    _matched_error(network(sketches[chosen]), truths[chosen]).backward()
                    optimiser.step()
            with torch.no_grad():
                error = float(_matched_error(network(sketches[:held]), truths[:held]))
            if error < lowest:
                best, lowest = {name: value.clone() for name, value in network.state_dict().items()}, error
            advance(epoch + 1, self.epochs, f"held-out error {lowest:.3g}")
        network.load_state_dict(best)
        return network, lowest


@dataclass(frozen=True, eq=False)
class _Hash:
    """Entries of an update, with random signs, added up in a few sums."""

    names: tuple[str, ...]
    places: Tensor  # (D,)
    signs: Tensor  # (D,)
    entries: int

    @classmethod
    def draw(cls, update: Update, entries: int, rng: Generator) -> _Hash:
        size, device = sum(change.numel() for change in update.values()), next(iter(update.values())).device
        places = torch.randint(entries, (size,), generator=rng, device=rng.device).to(device)
        signs = 2.0 * torch.randint(2, (size,), generator=rng, device=rng.device).to(device) - 1
        return cls(tuple(update), places, signs, entries)

    def __call__(self, update: Update) -> Tensor:
        flat = torch.cat([update[name].flatten() for name in self.names]).to(self.signs)
        return self.signs.new_zeros(self.entries).index_add(0, self.places, self.signs * flat)


def _simulate(exposure: Exposure, auxiliary: Batch, hashed: _Hash, count: int, size: int, rng: Generator) -> tuple[Tensor, Tensor]:
    """Updates of random batches of auxiliary samples, hashed (N, entries), and the pixels of these samples (N, B, *shape)."""
    public, sketches, chosen = exposure.public, [], []
    for done in range(count):
        places = torch.randperm(len(auxiliary.inputs), generator=rng, device=rng.device)[:size].to(auxiliary.inputs.device)
        with global_seed(int(torch.randint(2**31, (1,), generator=rng, device=rng.device)), "simulated client"):
            update = public.training(exposure.model, auxiliary.inputs[places].clone(), auxiliary.targets[places], public.loss)
        sketches.append(hashed(update))
        chosen.append(places)
        advance(done + 1, count, "simulated updates")
    pixels = to_pixels(auxiliary.inputs, public.normalization).to(sketches[0])
    return torch.stack(sketches), pixels[torch.stack(chosen)]


def _perceptron(entries: int, hidden: int, outputs: int, rng: Generator) -> nn.Module:
    layers = [skip_init(nn.Linear, *sizes) for sizes in ((entries, hidden), (hidden, hidden), (hidden, outputs))]
    network = nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2], nn.Sigmoid())
    with torch.no_grad():
        for parameter in network.parameters():
            bound = 1 / math.sqrt(parameter.shape[-1])
            parameter.copy_(bound * (2 * torch.rand(parameter.shape, generator=rng, device=rng.device).cpu() - 1))
    return network


def _matched_error(drawn: Tensor, truths: Tensor) -> Tensor:
    """The mean squared error at the best order of each batch's samples."""
    count, size = truths.shape[:2]
    drawn, truths = drawn.reshape(count, size, -1), truths.reshape(count, size, -1)
    if size > 1:
        costs = (drawn.detach()[:, :, None] - truths[:, None]).square().mean(3).cpu().numpy()  # (N, B, B)
        order = torch.stack([torch.from_numpy(linear_sum_assignment(cost)[1]) for cost in costs]).to(truths.device)
        truths = torch.gather(truths, 1, order[:, :, None].expand_as(truths))
    return (drawn - truths).square().mean()
