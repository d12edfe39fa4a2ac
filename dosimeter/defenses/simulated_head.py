"""A simulated gradient in place of the head's own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Generator, Tensor

from dosimeter.defenses.outgoing import own_weight, standard_normal, working_dtype
from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.registry import DEFENSES
from dosimeter.types import Refused, Update


@DEFENSES.register("simulated_head")
@dataclass(frozen=True, kw_only=True)
class SimulatedHead(Defense):
    """Sends a likeness of the head's weight gradient that keeps its statistics, and not its bias gradient.

    Zhang's thesis (Hong Kong Polytechnic University 2025), Section 4.5.4 and Fig. 4.6(a): what attacks on the head get from a
    client that does not share its head. `mode` "column_shuffle" permutes each column (one feature, all classes) separately.
    "statistics" and "column_statistics" draw Gaussian noise with the mean and standard deviation of the gradient, or of each
    column. "mask" replaces a random half of the entries by their mean.
    """

    side: ClassVar = "update"
    hides_head: ClassVar[bool] = True
    promise: ClassVar[str] = (
        "nothing by itself: the columns' statistics are kept, the classes' order is not; layers below are sent as they are"
    )
    breaks: ClassVar[str] = "training of the head, whose gradient no longer points anywhere"

    mode: Literal["column_shuffle", "statistics", "column_statistics", "mask"] = "column_shuffle"

    def distorts(self) -> bool:
        return True

    def __call__(self, client: Client, rng: Generator) -> Client:
        name, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        weight, bias = own_weight(self.name, client.model, name), f"{name}.bias" if name else "bias"

        def replace_head(update: Update) -> Update:
            if weight not in update:
                raise Refused("simulated_head needs the head's gradient, and an earlier defense withholds it")
            likeness = self.likeness(update[weight], rng)
            return {key: change for key, change in update.items() if key != bias} | {weight: likeness}

        return replace(client, outgoing=(*client.outgoing, replace_head))

    def likeness(self, gradient: Tensor, rng: Generator) -> Tensor:
        """The simulated gradient: (C, H) -> (C, H)."""
        exact = gradient.to(working_dtype(gradient))
        draw = torch.rand(exact.shape, generator=rng, device=rng.device).to(exact.device)
        if self.mode == "column_shuffle":
            return gradient.gather(0, draw.argsort(0))
        if self.mode == "mask":
            masked = draw < 0.5
            return torch.where(masked, exact[masked].mean() if bool(masked.any()) else 0, exact).to(gradient.dtype)
        over = 0 if self.mode == "column_statistics" else (0, 1)
        mean, deviation = exact.mean(over, keepdim=True), exact.std(over, keepdim=True, correction=0)
        return (mean + deviation * standard_normal(exact, rng)).to(gradient.dtype)
