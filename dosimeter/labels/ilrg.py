"""iLRG: counts from linear equations in the head's gradient."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from scipy.linalg import lstsq
from torch import Generator, Tensor
from torch.nn.functional import softmax

from dosimeter.head import Head, find_head
from dosimeter.interfaces import LabelRecovery, Loss
from dosimeter.labels.batch_size import declared_or_inferred
from dosimeter.labels.counting import counted, nearest_counts, whole_number_confidence
from dosimeter.options import PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Exposure, Knowledge, LabelEstimate, Refused

SMALLEST = 1e-12  # stands for a bias gradient of exactly zero (Section 3.1's ε)
CHUNK = 2**22  # logits held at once


@LABELS.register("ilrg")
@dataclass(frozen=True, kw_only=True)
class ILRG(LabelRecovery):
    """Counts each class by solving linear equations in the gradients of the head's weight and bias.

    Ma et al., "Instance-wise Batch Label Restoration via Gradients in Federated Learning", ICLR 2023: Eqs. (1)-(7),
    Algorithm 1.
    Departures: counts are completed to the batch size by the nearest whole numbers (the paper leaves them
    unnormalised: `as_published=True` rounds, sets negatives and values beyond the batch size to zero, and no more);
    the equations take the client's own loss, Σ_j k_j ∂ℓ(z_j, j)/∂z_i = K ∇b_i, which for cross-entropy is Eq. (6);
    they are solved for shares k/K, so that an undeclared batch size can be inferred; of more than `candidates` classes
    only those with the smallest bias gradients keep unknown and equation (the simplification under Eq. 7), since the
    whole system would hold classes² numbers.
    `details`: embeddings (n, H), probabilities (n, n) and their classes (n,), one row a candidate class.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})

    as_published: bool = False
    candidates: PositiveInt = 2048

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        if head.classes < 2:
            raise Refused("ilrg needs at least two logits; this model has one, for which posterior works")
        bias_gradient = head.bias_gradient.double()
        kept = bias_gradient.argsort()[: max(self.candidates, public.batch_size or 0)].sort().values  # (n,)
        embeddings = _class_embeddings(head.weight_gradient[kept].double(), bias_gradient[kept])  # (n, H)
        probabilities, gradients = _at_embeddings(head, embeddings, kept, public.loss)  # (n, n), (n, n)
        shares = _solve_shares(gradients, bias_gradient[kept])  # (n,) k_j / K
        size, message = declared_or_inferred(public.batch_size, shares, head.weight_gradient, self.name)
        estimate = torch.zeros_like(bias_gradient).index_copy(0, kept, size * shares)  # (C,)
        counts = _rounded_as_published(estimate, size) if self.as_published else nearest_counts(estimate, size)
        return counted(
            counts,
            scores=estimate,
            confidence=whole_number_confidence(estimate, counts),
            message=message,
            details={"embeddings": embeddings, "probabilities": probabilities, "classes": kept},
        )


def _class_embeddings(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """ē_i ≈ ∇W_i / ∇b_i (Eqs. 1-2)."""
    divisor = torch.where(bias_gradient == 0, SMALLEST, bias_gradient)
    return weight_gradient / divisor[:, None]


def _at_embeddings(head: Head, embeddings: Tensor, kept: Tensor, loss: Loss) -> tuple[Tensor, Tensor]:
    """Each candidate class's probabilities (Eq. 5) and logit gradients, at the candidates' logits: row j belongs to class j."""
    probabilities, gradients = [], []
    for rows in torch.arange(len(kept), device=kept.device).split(max(1, CHUNK // head.classes)):
        logits = torch.nan_to_num(head.logits(embeddings[rows]))  # (rows, C)
        probabilities.append(softmax(logits, 1)[:, kept])
        gradients.append(loss.logit_gradient(logits, kept[rows])[:, kept])
    return torch.cat(probabilities), torch.cat(gradients)


def _solve_shares(gradients: Tensor, bias_gradient: Tensor) -> Tensor:
    """Least squares of Σ_j s_j = 1 and Σ_j s_j ∂ℓ_j/∂z_i = ∇b_i (Eq. 7 divided by K): s (n,)."""
    system = torch.cat([torch.ones_like(gradients[:1]), gradients.T])  # (n + 1, n)
    right = torch.cat([torch.ones_like(bias_gradient[:1]), bias_gradient])
    noise = torch.finfo(torch.float32).eps
    if system.is_cuda:
        return torch.linalg.pinv(system, rtol=noise) @ right
    # SciPy's driver: torch leaves gelsy's column order uninitialised, so that the last bits differ from call to call.
    solved = lstsq(system.numpy(), right.numpy(), cond=noise, lapack_driver="gelsy", check_finite=False)
    assert solved is not None
    return torch.from_numpy(solved[0])


def _rounded_as_published(estimate: Tensor, size: int) -> Tensor:
    counts = estimate.clamp_min(0).round()
    return torch.where(counts > size, 0, counts).long()
