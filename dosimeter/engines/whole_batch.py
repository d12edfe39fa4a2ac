"""Whether candidates, taken for the whole declared batch, give the update that was sent, in all of its layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import combinations, islice, product

import torch
from torch import Tensor

from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.engines.misfit import SAME_UPDATE, common_factor
from dosimeter.engines.sample_share import mixes_samples
from dosimeter.engines.weight_rounding import rounding_of_weights
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head, find_head
from dosimeter.network.probing import input_of
from dosimeter.types import Refused

ROUNDING_REACH = 3.0  # times the root mean square of the rounding of weights, which every local step adds again
LARGEST_ERROR = 0.01  # relative, of one sample of the batch, that the rounding of weights may hide
LEAST_FEATURE = 1e-6  # singular value of the candidates' features, relative to the largest, that counts
MOST_CANDIDATES = 256
MOST_ORDERS = 90  # in which a client takes its samples in mini-batches: five of them in pairs have 30
MOST_TRIALS = 128  # of other candidates and labels, each in every order, where those that the head shows do not give the update
MOST_WORK = 4e9  # parameters times samples times steps of all trials


@dataclass(frozen=True, kw_only=True)
class Given:
    """The candidates that give the update."""

    places: Tensor  # (B,) ascending
    labels: Tensor  # (B,)


class WholeBatch:
    """Trains on candidates as the client does, and compares the whole update.

    B candidates, with B the declared size, that give the update in every layer are the batch. A mixture of samples has another weight,
    fires other neurons, and needs more samples than there are. So this also proves samples that a row alone does not: after local steps,
    behind a common factor, and where labels cancel.
    """

    def __init__(self, exposure: Exposure) -> None:
        self.exposure, self.size = exposure, exposure.public.batch_size or 0

    def is_possible(self) -> bool:
        """Whether the server can repeat what the client did, in any order that the client may have taken."""
        public, training = self.exposure.public, self.exposure.public.training
        plain = isinstance(training, FedSGD) or (isinstance(training, FedAvg) and len(self._orders(training)) > 0)
        sharp = all(d.side == "update" and not d.distorts() and d.scaling() in ("none", "update") for d in public.defenses)
        hard = public.loss.shift_invariant and public.classes > 1
        return self.size > 1 and plain and sharp and hard and not mixes_samples(self.exposure.model)

    def find(self, candidates: Tensor) -> Given | None:
        """The B of the candidates (n, *shape), the likeliest first, that are the batch; None where none are found."""
        if not self.size <= len(candidates) <= MOST_CANDIDATES:
            return None
        try:
            head = find_head(self.exposure)
        except Refused:
            return None
        if head.weight_gradient is None:
            return None
        inputs = candidates.to(head.weight)
        largest = self._errors(head, inputs).norm(dim=1).topk(self.size).indices.sort().values  # a candidate that is no sample has none
        likely = (largest, torch.arange(self.size, device=largest.device))  # large local steps hide the errors
        first = ((places, self._errors(head, inputs[places]).argmin(1)) for places in likely)  # an error is negative at the label alone
        training = self.exposure.public.training
        orders = self._orders(training) if isinstance(training, FedAvg) else [torch.arange(self.size)]
        for places, labels in (*first, *islice(self._others(head, inputs), self._most_trials() // len(orders))):
            if any(self._explains(inputs[places][order], labels[order]) for order in orders):
                return Given(places=places, labels=labels)
        return None

    def _others(self, head: Head, inputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Other choices of B candidates (B,) and their labels (B,), if these are few. Steps that overshoot turn an error's sign around."""
        if math.comb(len(inputs), self.size) > MOST_TRIALS:
            return
        labels = min(self.exposure.public.classes, int(MOST_TRIALS ** (1 / self.size)))  # of each candidate, the likeliest
        choices = [torch.tensor(one, device=inputs.device) for one in combinations(range(len(inputs)), self.size)]
        likeliest = [self._errors(head, inputs[places]).argsort(1) for places in choices]  # (B, C) each
        for ranks in sorted(product(range(labels), repeat=self.size), key=sum):
            for places, order in zip(choices, likeliest, strict=True):
                yield places, order.gather(1, torch.tensor(ranks, device=order.device)[:, None])[:, 0]

    def _most_trials(self) -> int:
        """As many as a large model allows."""
        training = self.exposure.public.training
        steps = training.local_steps(self.size) if isinstance(training, FedAvg) else 1
        parameters = sum(parameter.numel() for parameter in self.exposure.model.parameters())
        return min(MOST_TRIALS, int(MOST_WORK / (parameters * self.size * steps)))

    def _orders(self, training: FedAvg) -> list[Tensor]:
        """The orders (B,) in which the client may have trained on its samples, up to those within a mini-batch; none where too many."""
        size = training.mini_batch or self.size
        if size >= self.size:
            return [torch.arange(self.size)]
        sizes = [min(size, self.size - first) for first in range(0, self.size, size)]
        count = math.factorial(self.size) // math.prod(math.factorial(one) for one in sizes)
        if training.shuffle or training.accumulate > 1 or count > MOST_ORDERS:
            return []
        orders: list[tuple[int, ...]] = [()]
        for one in sizes:
            orders = [(*order, *piece) for order in orders for piece in combinations(sorted({*range(self.size)} - {*order}), one)]
        return [torch.tensor(order) for order in orders]

    def _errors(self, head: Head, inputs: Tensor) -> Tensor:
        """The errors e_i at the logits with which the features f_i of the inputs give the head's gradient Σ e_i f_iᵀ: (n, C)."""
        assert head.weight_gradient is not None
        features, gradient = input_of(self.exposure.model, head.name, inputs).detach().double(), head.weight_gradient.double()
        if head.bias_gradient is not None:
            features = torch.cat([features, features.new_ones(len(features), 1)], 1)
            gradient = torch.cat([gradient, head.bias_gradient.double()[:, None]], 1)
        return torch.linalg.pinv(features.T, rtol=LEAST_FEATURE) @ gradient.T

    def _explains(self, inputs: Tensor, labels: Tensor) -> bool:
        public, model, sent = self.exposure.public, self.exposure.model, self.exposure.update
        given = public.training(model, inputs, labels, public.loss)
        if not sent.keys() <= given.keys():
            return False
        scale = 1.0 if all(defense.scaling() == "none" for defense in public.defenses) else common_factor(given, sent)
        modules: dict[str, list[str]] = {}
        for name in sent:
            modules.setdefault(name.rpartition(".")[0], []).append(name)
        rounding = max(self._size(names, self._rounding) / self._size(names, sent.__getitem__) for names in modules.values())
        allowed = SAME_UPDATE + ROUNDING_REACH * rounding  # candidates have the rounding of the module that shows them
        return allowed * self.size <= LARGEST_ERROR and all(
            self._size(names, lambda name: scale * given[name].double() - sent[name].double())
            <= allowed * self._size(names, sent.__getitem__)
            for names in modules.values()
        )

    def _rounding(self, name: str) -> Tensor:
        return rounding_of_weights(self.exposure.model.get_parameter(name), self.exposure.update[name], self.exposure.public)

    def _size(self, names: list[str], value: Callable[[str], Tensor]) -> float:
        """The norm of values of all parameters of one module."""
        return max(math.hypot(*(float(value(name).double().norm()) for name in names)), torch.finfo(torch.float64).tiny)
