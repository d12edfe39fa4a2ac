"""Clients that the server simulates on its own samples, and what an update shows of the labels behind it."""

from __future__ import annotations

import torch
from torch import Generator, Tensor

from dosimeter.client.together import train_each
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head, parameter_name
from dosimeter.network.probing import copied_buffers, evaluation_mode, forward, input_of
from dosimeter.progress import advance
from dosimeter.types import Batch, Refused, Update

SPREAD = 0.5  # of a client's labels where nothing is known of them: Dirichlet(½), from nearly one class to all
FLOOR = 0.15  # added to each class's weight, so that a class that seems absent is simulated too


class Simulator:
    """Trains clients on auxiliary samples, as the client behind an exposure trains on its own."""

    def __init__(self, exposure: Exposure, rng: Generator, probes: int) -> None:
        assert exposure.auxiliary is not None
        assert exposure.public.batch_size is not None
        self.exposure, self.public, self.size = exposure, exposure.public, exposure.public.batch_size
        self.rng = Generator().manual_seed(int(torch.randint(2**31, (1,), generator=rng, device=rng.device)))
        targets = exposure.auxiliary.targets
        self.inputs, self.labels = exposure.auxiliary.inputs, targets.argmax(1) if targets.ndim == 2 else targets
        self.classes = max(self.public.classes, 2)
        self.seen = torch.bincount(self.labels, minlength=self.classes).cpu() > 0  # (C,)
        places = torch.arange(len(self.labels))[:: -(-len(self.labels) // probes)].to(self.labels.device)
        self.probes, own = self.inputs[places], torch.nn.functional.one_hot(self.labels[places], self.classes).double()
        self.own = own[:, -self.public.classes :]  # a single logit is the second answer's
        self.head = find_head(exposure)
        with evaluation_mode(exposure.model):
            self.feature = input_of(exposure.model, self.head.name, self.probes).double().mean(0)  # (H,)
        self.before = self._logits({})[0]

    def draw_counts(self, number: int, centre: Tensor | None = None, certainty: float = 1.0) -> Tensor:
        """(number, C) label counts around the shares `centre` (C,); without a centre, of any kind. Only of classes with samples."""
        chosen = self.seen.nonzero().flatten()
        weight = torch.full((self.classes,), SPREAD) if centre is None else certainty * centre.float().cpu() + FLOOR
        shares = torch._sample_dirichlet(weight[chosen].expand(number, -1).contiguous(), self.rng)  # pyright: ignore[reportPrivateImportUsage]
        drawn = chosen[torch.multinomial(shares, self.size, replacement=True, generator=self.rng)]  # (number, B)
        return torch.stack([torch.bincount(one, minlength=self.classes) for one in drawn])

    def simulate(self, counts: Tensor) -> Tensor:
        """The statistics of one client's update for each of these counts (K, C): (K, S, c)."""
        drawn = [(self._draw_places(one), int(torch.randint(2**31, (1,), generator=self.rng))) for one in counts]
        places, samples = torch.stack([place for place, _ in drawn]), Batch(self.inputs, self.labels)
        clients = train_each(self.public.training, self.exposure.model, samples, places, self.public.loss, [seed for _, seed in drawn])
        shown, done = [], 0
        for update in clients:
            shown.append(self._statistics({name: update[name] for name in self.exposure.update if name in update}))
            done += len(shown[-1])
            advance(done, len(counts), "simulated clients")
        return torch.cat(shown)

    def statistics(self, update: Update) -> Tensor:
        """What an update shows of each class, in a gradient's units: (S, c), c logits.

        How the logits change on average over all probes and over the class's own, with the model after the update; the head's row times
        the mean feature; the head's bias. Logits count up to a constant a sample, as in a softmax.
        """
        return self._statistics({name: change[None] for name, change in update.items()})[0]

    def _statistics(self, updates: Update) -> Tensor:
        """The same of several clients' updates (k, ...): (k, S, c)."""
        try:
            unit, decay = self.public.training.unit(self.size), self.public.training.decay(self.size)
        except Refused:
            unit, decay = 1.0, 1.0  # a gradient: one step of rate 1
        named = dict(self.exposure.model.named_parameters())
        after = {name: (decay * named[name].detach() - unit * change).to(named[name].dtype) for name, change in updates.items()}
        moved = (self._logits(after) - self.before) / unit  # (k, n, c)
        if moved.shape[2] > 1:
            moved = moved - moved.mean(2, keepdim=True)
        rows = [moved.mean(1), (moved * self.own).sum(1) / self.own.sum(0).clamp_min(1)]
        weight, bias = (updates.get(parameter_name(self.exposure.model, self.head.name, which)) for which in ("weight", "bias"))
        if weight is not None:
            rows.append(weight.double() @ self.feature)
        if bias is not None:
            rows.append(bias.double())
        return torch.stack(rows, 1).cpu()

    def _logits(self, parameters: Update) -> Tensor:
        """Of the probes, with these parameters (k, ...) of several clients in place of the model's: (k, n, c)."""
        model = self.exposure.model
        clients = [dict(zip(parameters, own)) for own in zip(*parameters.values())] or [{}]
        with torch.no_grad(), evaluation_mode(model):
            return torch.stack([forward(model, (own, copied_buffers(model)), self.probes) for own in clients]).double()

    def _draw_places(self, counts: Tensor) -> Tensor:
        """The places of auxiliary samples of these labels in random order, each once where a class has enough of them."""
        labels, chosen = self.labels.cpu(), []
        for label in counts.nonzero().flatten().tolist():
            own, wanted = (labels == label).nonzero().flatten(), int(counts[label])
            places = torch.randperm(len(own), generator=self.rng)[:wanted]
            if len(own) < wanted:
                places = torch.randint(len(own), (wanted,), generator=self.rng)
            chosen.append(own[places])
        every = torch.cat(chosen)
        return every[torch.randperm(len(every), generator=self.rng)].to(self.labels.device)
