"""Where RGLA's descent on a batch's logits ends: at the batch, or at its twin."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from scipy.optimize import linear_sum_assignment
from torch import Generator, Tensor
from torch.nn.functional import cross_entropy

from dosimeter.features.rgla import RGLA, LogitProblem
from dosimeter.network.head import Head
from dosimeter.options import NonNegativeFloat, PositiveFloat, PositiveInt
from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import LastLayer, last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study

RIGHT = 0.1  # the largest mean relative feature error of right data
OTHER_LABEL = 1e30  # cost of pairing samples of different labels


@STUDIES.register("logit_descent")
@dataclass(frozen=True, kw_only=True)
class LogitDescent(Study):
    """RGLA's logits beside the true ones: the squared error, the objective, the loss, and whether they are a twin.

    "RGLA: Reverse Gradient Leakage Attack using Inverted Cross-Entropy Loss Function": Fig. 3, Table 3, Table 6. Samples with one label
    are paired at the least squared error. `keep` takes the results of right data (mean feature error up to a tenth) or of twin data
    alone. `target` is what the loss is pulled to: Proposition 2's estimate, or the true loss, which no attacker has.
    Departure: the feature error stands in for the PSNR of a generator, which sees the features alone.
    """

    quantities: ClassVar = {
        "logit_error": True,  # mean over samples of ‖ŷ′ − ŷ‖²
        "mean_feature_error": True,
        "found_samples": False,  # the share of samples whose features are within 1 %
        "equations": True,  # L₁ of Eq. (4), without its weights α
        "reached_loss": False,
        "true_loss": False,
        "is_right": False,
    }

    steps: PositiveInt = 20_000
    learning_rate: PositiveFloat = 1e-3
    weight_term: NonNegativeFloat = 10_000.0
    bias_term: NonNegativeFloat = 1.0
    loss_term: NonNegativeFloat = 100.0
    target: Literal["estimate", "truth"] = "estimate"
    keep: Literal["all", "right", "twin"] = "all"

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        head = last_layer(client)
        problem = LogitProblem.of(_sent(head), head.labels)
        true_loss = cross_entropy(head.logits, head.labels)
        if self.target == "truth":
            problem = replace(problem, expected_loss=true_loss.to(problem.expected_loss))
        method = RGLA(
            steps=self.steps,
            learning_rate=self.learning_rate,
            weight_term=self.weight_term,
            bias_term=self.bias_term,
            loss_term=self.loss_term,
        )
        start = torch.randn(head.logits.shape, generator=rng).to(problem.bias)
        logits = method.descend(problem, start).double()
        squares = (logits[:, None] - head.logits).square().sum(2)  # (B, B)
        rows, partners = _pairs(squares, head.labels)
        features = problem.features(logits)
        errors = (features[rows] - head.features[partners]).norm(dim=1) / head.features[partners].norm(dim=1)  # (B,)
        right = float(errors.mean()) <= RIGHT
        if self.keep != "all" and right != (self.keep == "right"):
            return dict.fromkeys(self.quantities)
        plain = replace(method, weight_term=1.0, bias_term=1.0, loss_term=0.0)
        return {
            "logit_error": float(squares[rows, partners].mean()),
            "mean_feature_error": float(errors.mean()),
            "found_samples": float((errors < 0.01).double().mean()),
            "equations": float(plain.objective(logits.to(problem.bias), problem)),
            "reached_loss": float(cross_entropy(logits, head.labels)),
            "true_loss": float(true_loss),
            "is_right": float(right),
        }


def _sent(head: LastLayer) -> Head:
    """The layer with its gradients as a client sends them, in single precision."""
    return Head(
        name="",
        weight=head.weight.float(),
        bias=head.bias.float(),
        weight_gradient=(head.errors.T @ head.features / len(head.labels)).float(),
        bias_gradient=head.errors.mean(0).float(),
        non_negative=False,
    )


def _pairs(squares: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """For each recovered sample the true one with its label, at the least sum of squares."""
    costs = torch.nan_to_num(squares, nan=OTHER_LABEL).where(labels[:, None] == labels, OTHER_LABEL)
    rows, partners = linear_sum_assignment(costs.cpu().numpy())
    return torch.from_numpy(rows), torch.from_numpy(partners)
