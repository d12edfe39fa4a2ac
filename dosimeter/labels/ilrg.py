"""iLRG: counts from linear equations in the head's gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from scipy.linalg import lstsq
from torch import Generator, Tensor
from torch.nn.functional import softmax

from dosimeter.engines.counting.batch_size import batch_size_of, numerical_rank
from dosimeter.engines.counting.counts import nearest_counts, nothing_to_read
from dosimeter.engines.counting.shares import counts_of
from dosimeter.interfaces import Exposure, LabelRecovery, Loss, Public
from dosimeter.network.head import Head, find_head
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import LABELS
from dosimeter.types import Knowledge, LabelEstimate, Refused

ZERO_BIAS_GRADIENT = 1e-12  # stands for a bias gradient of exactly zero (Section 3.1's ε)
CHUNK = 2**22  # logits held at once
OUTLIER = 4.0  # times the median length, beyond which an embedding is not believed
WELL_CONDITIONED = 1e-3  # least ratio of pivots at which squaring the system's condition costs nothing
PRESENT = 0.3  # samples from which on a class takes part in the refinement


@LABELS.register("ilrg")
@dataclass(frozen=True, kw_only=True)
class ILRG(LabelRecovery):
    """Counts each class by solving linear equations in the gradients of the head's weight and bias.

    Ma et al., "Instance-wise Batch Label Restoration via Gradients in Federated Learning", ICLR 2023: Eqs. (1)-(7), Algorithm 1.
    Departures: the client's loss is used, Σ_j k_j ∂ℓ(z_j, j)/∂z_i = K ∇b_i (for cross-entropy Eq. 6). Shares k/K are solved for, so K
    can be inferred. Counts sum to the batch size. Embeddings that diverge become the mean feature. With few classes present,
    `refinements` rounds solve without Approximation 2. `as_published=True` undoes these last three and rounds as the paper does. Only
    the `candidates` smallest bias gradients are kept (below Eq. 7). `presence` names the method that says which classes occur; then the
    system is reduced to the counts of these (below Eq. 7 too).
    `details`: embeddings (n, H), probabilities (n, n), classes (n,), one row a candidate.
    """

    needs = frozenset({Knowledge.HEAD_GRADIENT, Knowledge.BIAS_GRADIENT})
    trust = 50
    needs_small_entries = True

    as_published: bool = False
    candidates: PositiveInt = 2048
    refinements: NonNegativeInt = 10
    presence: Literal["idlg", "gradinversion", "rlg"] | None = None

    def __call__(self, exposure: Exposure, rng: Generator) -> LabelEstimate:
        head, public = find_head(exposure), exposure.public
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        if head.classes < 2:
            raise Refused("ilrg needs at least two logits; this model has one, for which posterior works")
        if not bool(head.weight_gradient.any()) and not bool(head.bias_gradient.any()):
            return nothing_to_read(head.weight_gradient, public.batch_size)
        bias_gradient = head.bias_gradient.double()
        kept = bias_gradient.argsort()[: max(self.candidates, public.batch_size or 0)].sort().values  # (n,)
        embeddings = _class_embeddings(head.weight_gradient[kept].double(), bias_gradient[kept])  # (n, H)
        if not self.as_published:
            embeddings = _without_outliers(embeddings, head.weight_gradient[kept].double(), bias_gradient[kept])
        probabilities, gradients = _at_embeddings(head, embeddings, kept, public.loss, kept)  # (n, n), (n, n)
        unknown = self._occurring(exposure, kept, rng)  # (m,) positions in `kept`
        solved = _solve_shares(gradients[unknown], bias_gradient[kept])  # (m,) k_j / K
        shares = torch.zeros_like(bias_gradient[kept]).index_copy(0, unknown, solved)  # (n,)
        if not self.as_published:
            shares = self._refine_shares(head, kept, embeddings, gradients, shares, public)
        return counts_of(
            torch.zeros_like(bias_gradient).index_copy(0, kept, shares),
            head.weight_gradient,
            public,
            self.name,
            whole=_rounded_as_published if self.as_published else nearest_counts,
            details={"embeddings": embeddings, "probabilities": probabilities, "classes": kept},
        )

    def _occurring(self, exposure: Exposure, kept: Tensor, rng: Generator) -> Tensor:
        """The candidates that occur, by the method of `presence`; all of them without one, or where it names none: (m,)."""
        every = torch.arange(len(kept), device=kept.device)
        if self.presence is None:
            return every
        found = LABELS.build(self.presence)(exposure, rng).counts.to(kept.device)[kept] > 0
        return every[found] if bool(found.any()) else every

    def _refine_shares(self, head: Head, kept: Tensor, embeddings: Tensor, gradients: Tensor, shares: Tensor, public: Public) -> Tensor:
        """Refine the shares where few classes are present, without Approximation 2.

        With present classes j of share s_j and mean feature e_j, Σ_j s_j ∂ℓ_j/∂z_i (e_j, 1) = (∇W_i, ∇b_i) for every i: given the
        gradients at the current e_j, linear in s_j (e_j, 1), from which the next e_j and s_j follow. What is refined must explain
        the gradient better than what came before.
        """
        assert head.weight_gradient is not None
        assert head.bias_gradient is not None
        right = torch.cat([head.weight_gradient[kept], head.bias_gradient[kept, None]], 1).double()  # (n, H + 1)
        size = public.batch_size or batch_size_of(shares, numerical_rank(head.weight_gradient))
        ones = torch.ones_like(shares[:, None])
        best, lowest = shares, float((gradients.T @ (shares[:, None] * torch.cat([embeddings, ones], 1)) - right).norm())
        for _ in range(self.refinements + 1):
            present = torch.nonzero(shares * (size or 1 / shares.clamp_min(1e-9).max()) > PRESENT).flatten()  # (m,)
            if not 0 < len(present) <= head.classes // 2:
                break
            _, gradients = _at_embeddings(head, embeddings[present], kept, public.loss, kept[present])  # (m, n)
            solved = _least_squares(gradients.T, right)  # (m, H + 1): s_j (e_j, 1)
            misfit = float((gradients.T @ solved - right).norm())
            if not misfit < lowest * (1 - 1e-3):
                break
            lowest, best = misfit, torch.zeros_like(shares).index_copy(0, present, solved[:, -1])
            shares = best
            embeddings = embeddings.index_copy(0, present, solved[:, :-1] / solved[:, -1:])
        return best


def _class_embeddings(weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """ē_i ≈ ∇W_i / ∇b_i (Eqs. 1-2)."""
    divisor = torch.where(bias_gradient == 0, ZERO_BIAS_GRADIENT, bias_gradient)
    return weight_gradient / divisor[:, None]


def _without_outliers(embeddings: Tensor, weight_gradient: Tensor, bias_gradient: Tensor) -> Tensor:
    """Give classes whose ∇b is so near zero that the quotient runs away the batch's mean feature, Σ ∇W_i / Σ ∇b_i over ∇b_i > 0."""
    positive = bias_gradient > 0
    if not bool(positive.any()):
        return embeddings
    mean = weight_gradient[positive].sum(0) / bias_gradient[positive].sum()
    lengths = embeddings.norm(dim=1)
    runaway = lengths > OUTLIER * lengths.median()
    return torch.where(runaway[:, None], mean, embeddings)


def _at_embeddings(head: Head, embeddings: Tensor, kept: Tensor, loss: Loss, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Probabilities (Eq. 5) and logit gradients of embeddings (m, H) with `labels` (m,), at the logits of the classes `kept`: (m, n)."""
    probabilities, gradients = [], []
    for rows in torch.arange(len(labels), device=kept.device).split(max(1, CHUNK // head.classes)):
        logits = torch.nan_to_num(head.logits(embeddings[rows]))  # (rows, C)
        probabilities.append(softmax(logits, 1)[:, kept])
        gradients.append(loss.logit_gradient(logits, labels[rows])[:, kept])
    return torch.cat(probabilities), torch.cat(gradients)


def _solve_shares(gradients: Tensor, bias_gradient: Tensor) -> Tensor:
    """Least squares of Σ_j s_j = 1 and Σ_j s_j ∂ℓ_j/∂z_i = ∇b_i (Eq. 7 divided by K): s (n,)."""
    system = torch.cat([torch.ones_like(gradients[:, :1]).T, gradients.T])  # (n + 1, m): m unknowns
    right = torch.cat([torch.ones_like(bias_gradient[:1]), bias_gradient])
    factor, failed = torch.linalg.cholesky_ex(system.T @ system)  # thirty times faster than an orthogonal factorisation
    pivots = factor.diagonal()
    if int(failed) == 0 and float(pivots.min()) > WELL_CONDITIONED * float(pivots.max()):
        return torch.cholesky_solve((system.T @ right)[:, None], factor)[:, 0]
    noise = torch.finfo(torch.float32).eps
    if system.is_cuda:
        return torch.linalg.pinv(system, rtol=noise) @ right
    # SciPy's driver: torch leaves gelsy's column order uninitialised, so that the last bits differ from call to call.
    solved = lstsq(system.numpy(), right.numpy(), cond=noise, lapack_driver="gelsy", check_finite=False)
    assert solved is not None
    return torch.from_numpy(solved[0])


def _least_squares(system: Tensor, right: Tensor) -> Tensor:
    """By normal equations: the system is near minus the identity, so that squaring its condition costs nothing."""
    normal = system.T @ system
    ridge = 1e-10 * normal.diagonal().mean() * torch.eye(len(normal), dtype=normal.dtype, device=normal.device)
    solved, failed = torch.linalg.solve_ex(normal + ridge, system.T @ right)
    if int(failed) == 0:
        return solved
    return torch.linalg.pinv(normal, rtol=1e-10, hermitian=True) @ (system.T @ right)  # classes whose embedding saturates the softmax


def _rounded_as_published(estimate: Tensor, size: int) -> Tensor:
    counts = estimate.clamp_min(0).round()
    return torch.where(counts > size, 0, counts).long()
