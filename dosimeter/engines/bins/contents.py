"""What the bins of an inserted layer held: samples that lay alone are read off, taken out of the other bins, and so on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.bins.inserted_layer import InsertedLayer
from dosimeter.engines.bins.replay import Replayer
from dosimeter.engines.bins.shared import separate
from dosimeter.engines.recursion.levels import near_levels, on_levels, posterised, visible
from dosimeter.normalization import input_bounds
from dosimeter.types import Normalization

AGREEMENT = 2e-3  # relative difference up to which two bins hold the same sample
MARGIN = 300.0  # times the rounding noise that a sample must stand out by: 40 dB and more
ROUGHLY = 0.1  # how far a replayed weight may be off where two bins agree: a kink may lie between a sample and its replay
SAME = 0.01  # relative distance up to which two recovered samples are one
EMPTY = 8.0  # times the rounding noise below which a bin counts as empty
SLACK = 0.02  # of the pixel range: how far outside a recovered pixel may lie


@dataclass(frozen=True, kw_only=True)
class Decoded:
    """The samples that were found alone in a bin."""

    inputs: Tensor  # (n, d) float64
    weights: Tensor  # (n,) each sample's δ
    occupied: int  # bins that still hold something afterwards
    residual: float  # the norm of what they hold, relative to the norm of all


def decode(
    layer: InsertedLayer,
    weight_gradient: Tensor,
    bias_gradient: Tensor,
    normalization: Normalization,
    shape: tuple[int, ...],
    replay: Replayer | None,
) -> Decoded:
    """Read samples off the layer's gradient; a sample is claimed only where something besides its own bin confirms it.

    A bin's content is (U, S) = Σ δ_i (x_i, 1); of a bin that holds one sample, x = U/S. It is confirmed where all of x lies on
    the 256 levels of a picture's pixels, on many of them, between which a mixture lies. For data without levels, or with few, where
    the bin of another functional that x falls into holds the same content, and where the model itself gives x the weight S (`replay`,
    roughly beside an agreement, else exactly). Where some lie on levels, one that lies off them is a mixture, unless its rounding
    noise hides the levels: it then needs the agreement.
    What is found is subtracted from every functional's bin, which leaves other samples alone in theirs. Where none is left alone,
    `separate` tells samples apart that share all their bins; of those only levels or the exact weight confirm one, since two
    samples that have all bins in common look like one to it.
    """
    state = _State(layer, weight_gradient, bias_gradient, normalization, shape)
    whole = float(state.contents.norm())
    found: list[Tensor] = []
    pictures = False
    while True:
        rows, places = state.candidates()
        contents = state.contents[rows]
        confirmed = state.on_levels(contents)
        pictures |= bool(state.near_levels(contents).any())
        if not bool(confirmed.any()):
            confirmed = state.agreeing(rows, places)
            if pictures:
                confirmed &= ~state.off_levels(contents)
            if replay is not None and len(rows):
                agreeing = confirmed.nonzero().flatten()
                confirmed = _replayed(contents, agreeing[_first_of_each(places[agreeing])], replay, ROUGHLY)
                if not bool(confirmed.any()):
                    confirmed = _replayed(contents, state.standing(contents, pictures), replay, replay.exact)
        if not bool(confirmed.any()):
            contents, places = state.separated()
            confirmed = state.on_levels(contents)
            if replay is not None and not bool(confirmed.any()):
                confirmed = _replayed(contents, state.standing(contents, pictures), replay, replay.exact)
        if not bool(confirmed.any()):
            break
        found.append(state.take(contents[confirmed], places[confirmed]))
    contents = torch.cat(found) if found else state.contents[:0]
    inputs = _quotients(contents)
    once = _distinct(inputs)
    left = state.alive()
    return Decoded(
        inputs=inputs[once],
        weights=contents[once, -1],
        occupied=int(left.sum()),
        residual=float(state.contents[left].norm()) / whole if whole > 0 else 0.0,
    )


class _State:
    """The occupied bins of all functionals, side by side."""

    def __init__(
        self, layer: InsertedLayer, weight_gradient: Tensor, bias_gradient: Tensor, normalization: Normalization, shape: tuple[int, ...]
    ) -> None:
        self.layer, self.shape, self.normalization = layer, shape, normalization
        self.few = False  # whether the pictures have been seen to have few levels
        full = (torch.cat([part, torch.zeros_like(part[:1])]) for part in weight_gradient.split(layer.bins))
        biases = (torch.cat([part, torch.zeros_like(part[:1])]) for part in bias_gradient.split(layer.bins))
        if layer.sparse:  # a row answers inside its own bin alone
            inner, outer = weight_gradient, bias_gradient
        else:  # bin l holds what row l answers to and row l + 1 does not (Fowl et al., Eq. 6)
            inner = torch.cat([part[:-1] - part[1:] for part in full])
            outer = torch.cat([part[:-1] - part[1:] for part in biases])
        rows = weight_gradient.norm(dim=1).double().square() + bias_gradient.double().square()
        self.noise = 4 * torch.finfo(weight_gradient.dtype).eps * float(rows.max().sqrt())
        sizes = torch.hypot(inner.norm(dim=1).double(), outer.double())  # of a black sample only the bias says anything
        occupied = (sizes > self.noise).nonzero().flatten()
        self.contents = torch.cat([inner[occupied].double(), outer[occupied, None].double()], 1)  # (m, d + 1)
        self.row_of = torch.full((sum(layer.bins),), -1, device=occupied.device)
        self.row_of[occupied] = torch.arange(len(occupied), device=occupied.device)
        starts = torch.tensor([0, *layer.bins], device=occupied.device).cumsum(0)
        self.starts = starts[:-1]
        self.functional_of = torch.bucketize(occupied, self.starts, right=True) - 1  # (m,)
        first = layer.rows.weight.detach()[self.starts].double()  # (F, d) of which every row is a multiple
        self.functionals = first
        counts = torch.tensor(layer.bins, device=occupied.device)
        sizes = layer.rows.weight.detach().norm(dim=1).double() / first.norm(dim=1).repeat_interleave(counts)
        self.edges = (-layer.rows.bias.detach().double() / sizes).split(layer.bins)
        low, high = input_bounds(normalization, self.contents.new_zeros(1, *shape))
        self.low = (low - SLACK * (high - low)).expand(1, *shape).flatten()
        self.high = (high + SLACK * (high - low)).expand(1, *shape).flatten()

    def alive(self) -> Tensor:
        return self.contents.norm(dim=1) > EMPTY * self.noise

    def on_levels(self, contents: Tensor) -> Tensor:
        """Whether the quotients of contents (n, d + 1) are pictures by their levels: (n,)."""
        inputs = _quotients(contents).reshape(-1, *self.shape)
        self.few |= posterised(inputs, self.normalization)
        return on_levels(inputs, self.normalization, self._errors(contents), few=self.few)

    def near_levels(self, contents: Tensor) -> Tensor:
        """Whether the quotients of contents (n, d + 1) lie on levels, be it by chance: (n,)."""
        return near_levels(_quotients(contents).reshape(-1, *self.shape), self.normalization)

    def off_levels(self, contents: Tensor) -> Tensor:
        """Whether the quotients of contents (n, d + 1) lie off levels that their rounding noise would not hide: (n,)."""
        return ~self.near_levels(contents) & visible(self._errors(contents), self.low, self.high)

    def standing(self, contents: Tensor, pictures: bool) -> Tensor:
        """Which of contents (n, d + 1), by index, their weight alone may confirm: of pictures those on levels."""
        return (self.near_levels(contents) | (not pictures)).nonzero().flatten()

    def _errors(self, contents: Tensor) -> Tensor:
        """The root mean square of the rounding noise in each quotient: (n,)."""
        return self.noise / (contents[:, -1].abs() * (contents.shape[1] - 1) ** 0.5)

    def candidates(self) -> tuple[Tensor, Tensor]:
        """Bins whose quotient is an input that would lie in that very bin, and in an occupied one of every functional: (n,), (n, F)."""
        rows = (self.contents.norm(dim=1) > MARGIN * self.noise).nonzero().flatten()
        inside, places = self.places_of(self.contents[rows])
        sound = inside & (places == rows[:, None]).any(1)
        return rows[sound], places[sound]

    def separated(self) -> tuple[Tensor, Tensor]:
        """Contents (n, d + 1) of samples that share all their bins with others, and the places of these (n, F)."""
        rows = self.alive().nonzero().flatten()
        contents, places = separate(self.contents[rows], self.functional_of[rows], self.noise)
        sound = contents.norm(dim=1) > MARGIN * self.noise
        contents, places = contents[sound], rows[places[sound]]
        inside, fitting = self.places_of(contents)
        sound = inside & (places == fitting).all(1) if len(places) else inside
        return contents[sound], places[sound]

    def places_of(self, contents: Tensor) -> tuple[Tensor, Tensor]:
        """Whether quotients lie in the data range and in occupied bins (n,), and in which row of each functional (n, F)."""
        inputs = _quotients(contents)
        inside = ((inputs >= self.low) & (inputs <= self.high)).all(1)
        values = inputs @ self.functionals.T  # (n, F)
        bins = torch.stack([torch.searchsorted(edges, column.contiguous()) - 1 for edges, column in zip(self.edges, values.T)], 1)
        counts = torch.tensor(self.layer.bins, device=bins.device)
        places = self.row_of[self.starts + bins.clamp_min(0).minimum(counts - 1)]  # (n, F)
        inside &= (bins >= 0).all(1) & (places >= 0).all(1) & self.alive()[places].all(1)
        return inside, places

    def agreeing(self, rows: Tensor, places: Tensor) -> Tensor:
        """Whether another functional's bin holds the same content: (n,)."""
        own = self.contents[rows]
        tolerance = AGREEMENT * own.norm(dim=1) + self.noise
        same = torch.stack([(self.contents[column] - own).norm(dim=1) <= tolerance for column in places.T], 1) if len(rows) else places > 0
        return (same & (places != rows[:, None])).any(1)

    def take(self, contents: Tensor, places: Tensor) -> Tensor:
        """Subtract each confirmed sample from the bins that it lies in, once; returns what was taken: (n, d + 1)."""
        first = _first_of_each(places)
        taken = contents[first]
        for column in places[first].T:
            self.contents.index_add_(0, column, -taken)
        return taken


def _quotients(contents: Tensor) -> Tensor:
    """x = U/S of contents (U, S): (n, d)."""
    return contents[:, :-1] / contents[:, -1:]


def _replayed(contents: Tensor, chosen: Tensor, replay: Replayer, tolerance: float) -> Tensor:
    """Which contents (n, d + 1), of those `chosen` by index, have the weight that the model gives their inputs: (n,)."""
    confirmed = torch.zeros(len(contents), dtype=torch.bool, device=contents.device)
    if len(chosen):
        confirmed[chosen] = replay(_quotients(contents[chosen]), contents[chosen, -1]) <= tolerance
    return confirmed


def _distinct(inputs: Tensor) -> Tensor:
    """Which samples (n, d) repeat no earlier one: what a faint sample leaves in two bins would else be claimed twice."""
    if len(inputs) == 0:
        return torch.zeros(0, dtype=torch.bool, device=inputs.device)
    apart = torch.cdist(inputs, inputs, compute_mode="use_mm_for_euclid_dist")
    return ~torch.tril(apart <= SAME * inputs.norm(dim=1), -1).any(1)


def _first_of_each(places: Tensor) -> Tensor:
    """The index of the first of each distinct row of `places`."""
    distinct, inverse = torch.unique(places, dim=0, return_inverse=True)
    order = torch.arange(len(places), device=places.device)
    return torch.full((len(distinct),), len(places), device=places.device).scatter_reduce(0, inverse, order, "amin")
