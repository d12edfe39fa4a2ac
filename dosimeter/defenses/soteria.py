"""Soteria: the head's gradient without the most revealing features."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Generator, Tensor, nn
from torch.nn.functional import one_hot

from dosimeter.defenses.outgoing import live_entries, own_weight, survivors_replay
from dosimeter.interfaces import Attack, Client, Defense, Public, Replay
from dosimeter.network.head import locate_head
from dosimeter.network.probing import input_of
from dosimeter.options import Fraction, PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Distortion, Encoding, ProtectedUnit, Update

VALUES_AT_ONCE = 2**20  # input-gradient entries in one batched backward pass


@DEFENSES.register("soteria")
@dataclass(frozen=True, kw_only=True)
class Soteria(Defense):
    """Zeroes the columns of the head's gradient whose features say most about the input.

    Sun et al., "Soteria: Provable Defense against Privacy Leakage in Federated Learning from Representation Perspective", CVPR 2021.
    Let r be the input of the last linear layer. The ⌊ratio · H⌋ features with the largest |r_i| / ‖∂r_i/∂X‖ (for ‖r_i (∂r_i/∂X)⁻¹‖) are
    zeroed in ∇W = Σ (p − y) rᵀ. Scores are summed over the batch.
    List it after the defenses of data and model.
    Departure: `probes` random sign vectors v estimate all norms, as E (∂r_i/∂X · v)² = ‖∂r_i/∂X‖², without a backward pass each. In
    train mode, batch norm makes each feature depend on all samples; the estimate includes those slopes.
    """

    side: ClassVar = "update"
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset({"sample", "client"})  # the zeros depend on the samples and carry no noise
    promise: ClassVar[str] = (
        "a bound on reconstruction from the representation alone, under the paper's assumptions; no other layer is touched"
    )
    breaks: ClassVar[str] = (
        "training of the head's zeroed columns; a gradient of the inputs for every feature, hence minutes on wide models without `probes`"
    )
    strengths: ClassVar = ({"ratio": 0.4, "probes": 8}, {"ratio": 0.9, "probes": 8})

    ratio: Fraction
    probes: PositiveInt | None = None  # None: the paper's norms, exactly

    def distorts(self) -> bool:
        return self.ratio > 0

    def __call__(self, client: Client, rng: Generator) -> Client:
        name, _ = locate_head(client.model, tuple(client.batch.inputs.shape[1:]), client.loss.shift_invariant)
        layer = own_weight(self.name, client.model, name)
        scores = feature_scores(client.model, name, client.batch.inputs, self.probes, rng)  # (H,)
        telling = scores.topk(math.floor(self.ratio * len(scores) + 1e-9)).indices

        def without_telling(update: Update) -> Update:
            if layer not in update or len(telling) == 0:
                return dict(update)
            return update | {layer: update[layer].index_fill(1, telling, 0)}

        return replace(client, outgoing=(*client.outgoing, without_telling))

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        """Entries of a removed column are unknown."""
        whole = live_entries(change)
        return replace(whole, live=whole.live & change.any(0)) if change.ndim > 1 else whole

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note="takes nothing out") if self.ratio == 0 else survivors_replay(sent, _has_empty_column, later)

    def encoding(self, before: Encoding) -> Encoding:
        return replace(before, rank=None, sparse=True) if self.ratio > 0 else before


def _has_empty_column(change: Tensor) -> bool:
    return change.ndim == 2 and not bool(change.any(0).all())


def feature_scores(model: nn.Module, head: str, inputs: Tensor, probes: int | None = None, rng: Generator | None = None) -> Tensor:
    """Σ over samples of |r_i| / ‖∂r_i/∂X‖ for every feature of the head: (H,); 0 for a feature that is zero."""
    leaf = inputs.detach().clone().requires_grad_()
    with torch.enable_grad(), torch.random.fork_rng():
        features = input_of(model, head, leaf.clone(), differentiable=True)  # (B, H)
    slopes = _slopes(features, leaf) if probes is None or rng is None else _estimate_slopes(features, leaf, probes, rng)  # (B, H)
    sizes = features.detach().abs()
    return torch.where(sizes > 0, sizes / slopes.clamp_min(torch.finfo(sizes.dtype).tiny), 0).sum(0)


def _slopes(features: Tensor, leaf: Tensor) -> Tensor:
    """‖∂ Σ_b r_bi/∂X_b‖, many features in one backward pass: (B, H)."""
    pieces = torch.arange(features.shape[1], device=leaf.device).split(_at_once(leaf))
    wanted = (one_hot(some, features.shape[1]).to(features)[:, None].expand(-1, len(features), -1) for some in pieces)  # (k, B, H)
    return torch.cat([_backward(features, leaf, some).flatten(2).norm(dim=2) for some in wanted]).T


def _estimate_slopes(features: Tensor, leaf: Tensor, probes: int, rng: Generator) -> Tensor:
    """The root mean square of ∂r/∂X · v over directions v of independent signs: (B, H).

    The backward pass u -> uᵀ ∂r/∂X is linear in u, so its own derivative at v is the wanted product.
    """
    anywhere = torch.zeros_like(features, requires_grad=True)
    (backward,) = torch.autograd.grad(features, leaf, anywhere, create_graph=True)
    square = torch.zeros_like(features)
    for count in (len(some) for some in torch.arange(probes).split(_at_once(leaf))):
        signs = torch.randint(2, (count, *leaf.shape), generator=rng, device=rng.device).to(leaf) * 2 - 1
        square += _backward(backward, anywhere, signs).square().sum(0)
    return (square / probes).sqrt()


def _at_once(leaf: Tensor) -> int:
    return max(1, VALUES_AT_ONCE // max(1, leaf.numel()))


def _backward(outputs: Tensor, inputs: Tensor, cotangents: Tensor) -> Tensor:
    """The gradients of `outputs` at `inputs` against each of k cotangents: (k, *inputs' shape)."""
    try:
        return torch.autograd.grad(outputs, inputs, cotangents, retain_graph=True, is_grads_batched=True)[0]
    except RuntimeError:  # the model has an operation of its own that cannot be batched
        return torch.stack([torch.autograd.grad(outputs, inputs, one, retain_graph=True)[0] for one in cotangents])
