"""iLRG's three approximations and its embeddings, beside Soteria's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor
from torch.nn.functional import cosine_similarity, one_hot

from dosimeter.runs.measurement import AuditedClient
from dosimeter.runs.reproduction.studies.last_layer import last_layer
from dosimeter.runs.reproduction.studies.study import STUDIES, Study

ERRORS = ("approximation1", "approximation2", "approximation2_weight", "approximation3")


@STUDIES.register("class_embeddings")
@dataclass(frozen=True, kw_only=True)
class ClassEmbeddings(Study):
    """The errors of iLRG's approximations, and of the features of a class as iLRG and Soteria read them off the gradient.

    Ma et al., "Instance-wise Batch Label Restoration", ICLR 2023: Approximations 1-3 (Eqs. 1, 2, 5), Tables 3 and 4. Approximation 2 is
    about all classes, the others and the embeddings about those that occur. Soteria's embedding is ∇W_i itself, here with the sign of
    the true one (the paper's "(-)").
    Departure: a relative error is ‖estimate − truth‖ / ‖truth‖ over a class's entries, since single true entries are zero behind a ReLU.
    """

    quantities: ClassVar = {
        **{f"{name}_{kind}": True for name in ERRORS for kind in ("mse", "mre")},
        "embedding_mse": True,
        "embedding_cosine": False,
        "soteria_mse": True,
        "soteria_cosine": False,
    }

    def __call__(self, client: AuditedClient, rng: Generator) -> dict[str, float | None]:
        head = last_layer(client)
        size, classes = len(head.labels), len(head.weight)
        members = one_hot(head.labels, classes).T.to(head.features)  # (C, B): the samples of each class
        present = members.sum(1) > 0
        members, ids = members[present], torch.nonzero(present).flatten()  # (n, B), (n,)
        shares = members / members.sum(1, keepdim=True)
        errors, probabilities = head.errors, head.probabilities  # (B, C)
        bias_gradient = errors.mean(0)  # (C,)
        weight_gradient = errors.T @ head.features / size  # (C, H)
        embeddings = shares @ head.features  # (n, H) the truth
        own = errors[:, ids].T  # (n, B): each sample's slope at the class's bias
        of_class = (shares * own) @ head.features  # (n, H): left of Eq. (1)
        product = (shares * own).sum(1, keepdim=True) * embeddings  # (n, H): right of Eq. (1)
        from_own = one_hot(head.labels, classes).T * errors.T / size  # (C, B): what Eq. (2) keeps
        found = weight_gradient[ids] / bias_gradient[ids, None]  # (n, H)
        softened = torch.softmax(embeddings @ head.weight.T + head.bias, 1)  # (n, C): right of Eq. (5)
        return {
            **_errors("approximation1", product, of_class),
            **_errors("approximation2", from_own.sum(1, keepdim=True), bias_gradient[:, None]),
            **_errors("approximation2_weight", from_own @ head.features, weight_gradient),
            **_errors("approximation3", softened, shares @ probabilities),
            "embedding_mse": _mse(found, embeddings),
            "embedding_cosine": float(cosine_similarity(found, embeddings).mean()),
            "soteria_mse": _mse(weight_gradient[ids], embeddings),
            "soteria_cosine": float(cosine_similarity(weight_gradient[ids], embeddings).abs().mean()),
        }


def _errors(name: str, estimate: Tensor, truth: Tensor) -> dict[str, float | None]:
    """Mean squared and mean relative error over rows; rows of zeros have no relative error."""
    lengths = truth.norm(dim=1)
    relative = ((estimate - truth).norm(dim=1) / lengths)[lengths > 0]
    return {f"{name}_mse": _mse(estimate, truth), f"{name}_mre": float(relative.mean()) if len(relative) else None}


def _mse(estimate: Tensor, truth: Tensor) -> float:
    return float((estimate - truth).square().mean())
