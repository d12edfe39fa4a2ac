"""A classifier without a bias."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Generator

from dosimeter.interfaces import Client, Defense
from dosimeter.network.head import locate_head
from dosimeter.registry import DEFENSES


@DEFENSES.register("bias_free_head")
@dataclass(frozen=True, kw_only=True)
class BiasFreeHead(Defense):
    """Takes the bias out of the last linear layer, so that there is none to send.

    Scheliga, Mäder & Seeland, "Combining Variational Modeling with Partial Gradient Perturbation to Prevent Deep Gradient Leakage",
    2022 (thesis Section 4.2.3).
    Departure: only the head's bias is removed, whose gradient counts the labels. The paper removes the biases of all linear layers.
    """

    side: ClassVar = "model"
    promise: ClassVar[str] = "no head bias gradient exists; the weight's gradient determines labels and features without it"
    breaks: ClassVar[str] = "a trained model's class priors, until it is trained on"

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["none"]:
        return "none"

    def __call__(self, client: Client, rng: Generator) -> Client:
        name, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        if client.model.get_submodule(name).bias is None:
            return client
        model = copy.deepcopy(client.model)
        model.get_submodule(name).register_parameter("bias", None)
        return replace(client, model=model)
