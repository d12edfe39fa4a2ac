"""Which candidates a layer's gradient is a sum of: its spans tell, as long as the layer has more room than the batch fills."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.types import Refused

ROUNDING_SLACK = 64.0  # how many roundings of an entry the errors of a long sum may reach
REFUTED_SLACK = 16.0  # times that, from which a direction of the gradient refutes the declared size
CLAIMED_SHARE = 1 / 16  # of the error bar, within which a candidate is claimed: far above what rounding does, below what others reach
LARGEST_ERROR_BAR = 0.01  # a layer whose rounding may move a residual further decides nothing
SMALLEST_EXCLUSION = 1e-3  # distance from the span from which on a candidate is excluded


@dataclass(frozen=True, kw_only=True)
class Span:
    """The span of one layer's gradient, which a batch of the declared size leaves room in."""

    layer: str
    left: Tensor  # (m, r) orthonormal columns
    values: Tensor  # (r,)
    right: Tensor  # (r, n)
    rounding: float  # what rounding may add to an entry of the spectrum
    error_bar: float  # what rounding may add to a member's distance


@dataclass(frozen=True, kw_only=True)
class SpanTest:
    """How far each candidate is from being one of the layer's samples."""

    outside: Tensor  # (n,) share of a candidate's gradient outside the span, up to `error_bar` for a member; nan: it leaves no trace
    distances: Tensor  # (n,) the same, and its share of the gradient counted: 0 for a member of a mean over samples

    def joined(self, other: SpanTest) -> SpanTest:
        """Both tests' candidates, in order."""
        return SpanTest(outside=torch.cat((self.outside, other.outside)), distances=torch.cat((self.distances, other.distances)))


def span_of(layer: str, sent: Tensor, *, batch_size: int, positions: int) -> Span | None:
    """The span of a layer's gradient `sent` (m, n), where it decides; each sample adds a matrix of rank `positions`.

    `sent` is G = (1/B) Σ gᵢ. If it has rank B·P for P positions, then the gᵢ are independent. The layer must have room for one more. A
    higher rank refutes the declared size, whatever other layers show.
    """
    room, rank = min(sent.shape), batch_size * positions
    if rank >= room:
        return None
    left, values, right = torch.linalg.svd(sent.double(), full_matrices=False)
    rounding = ROUNDING_SLACK * torch.finfo(sent.dtype).eps * float(values[0])
    if float(values[rank]) > REFUTED_SLACK * rounding:
        raise Refused(
            f"the gradient of {layer} has more directions than {batch_size} samples give it: the declared batch size is wrong, "
            "or the update is no sum of their gradients"
        )
    if values[rank - 1] <= 0 or float(values[rank]) > rounding:
        return None
    error_bar = 2 * rounding / float(values[rank - 1])
    if error_bar > LARGEST_ERROR_BAR:
        return None
    return Span(layer=layer, left=left[:, :rank], values=values[:rank], right=right[:rank], rounding=rounding, error_bar=error_bar)


def span_test(span: Span, terms: Tensor) -> SpanTest:
    """The distances of candidates with gradients `terms` (k, m, n) of their own.

    Ours. With G and the gᵢ as in `span_of`, G⁺ maps each gᵢ/B to a projection of rank P (Wedderburn's rank reduction): rows and columns of
    gᵢ lie in those of G, and tr G⁺gᵢ = B·P. A sample outside the batch fits only if its own features and errors lie in the span of the
    batch's, with the right length. The length is right where the loss is a mean over samples.
    """
    terms = terms.double()
    sizes = terms.flatten(1).norm(dim=1)
    norms = sizes.clamp(min=torch.finfo(torch.float64).tiny)
    outside_rows = (terms - terms @ span.right.mT @ span.right).flatten(1).norm(dim=1) / norms
    outside_columns = (terms - span.left @ (span.left.mT @ terms)).flatten(1).norm(dim=1) / norms
    inside = torch.einsum("mr,kmn,rn->kr", span.left, terms, span.right)  # diagonal of leftᵀ g rightᵀ
    share = (inside / span.values).sum(1) / len(span.values)  # tr G⁺g / (B·P)
    silent = sizes <= span.rounding  # a candidate that leaves no trace can be neither found nor excluded
    outside = torch.where(silent, torch.nan, torch.maximum(outside_rows, outside_columns))
    return SpanTest(outside=outside, distances=torch.maximum(outside, (share - 1).abs()))


def missing_rows(sent: Tensor, terms: Tensor, batch_size: int) -> Tensor:
    """The share of each candidate's gradient (k, V, H) of an embedding that lies in rows of `sent` (V, H) which hold nothing: (k,).

    A token that occurs in the batch leaves a row, unless the samples' terms cancel to the last bit.
    """
    empty = (sent == 0).all(1)  # (V,)
    rows = terms.double().norm(dim=2) / batch_size  # (k, V)
    floor = torch.finfo(sent.dtype).tiny / torch.finfo(sent.dtype).eps  # what underflow may hide
    missed = torch.where(empty & (rows > floor), rows, 0).norm(dim=1)
    return missed / rows.norm(dim=1).clamp(min=torch.finfo(torch.float64).tiny)
