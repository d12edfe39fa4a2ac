"""What the bins of an inserted layer held: samples that lie alone are read off and subtracted, until none lies alone."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from dosimeter.engines.bins.inserted_layer import InsertedLayer
from dosimeter.engines.bins.replay import Replayer
from dosimeter.engines.bins.shared import dependences, possible_places, separate_all, separate_shared_bins
from dosimeter.engines.recursion.levels import LARGEST_LEVEL, are_near_levels, are_single_pictures, have_few_levels, levels_are_visible
from dosimeter.normalization import input_bounds
from dosimeter.types import Normalization

SAME_CONTENT = 2e-3  # relative difference up to which two bins hold the same sample
CLAIM_MARGIN = 300.0  # times the rounding noise that a claimed sample must exceed: some 50 dB
WEIGHT_ROUNDINGS = 3.0  # times the rounding noise that the weight of one sample may miss the model's; mixtures miss it by hundreds
SAME_SAMPLE = 0.01  # relative distance up to which two recovered samples are one
EMPTY_BIN = 8.0  # times the rounding noise below which a bin counts as empty
LEVEL_REACH = 0.5  # levels by which a defense may have moved a pixel: with more, another level is shown
RANGE_SLACK = 0.02  # of the pixel range: how far outside it a recovered pixel may lie


@dataclass(frozen=True, kw_only=True)
class Blur:
    """By how much the client's rounding and its defenses may have changed each row's gradient, or what each bin holds."""

    norms: Tensor  # (k,) of the change of one row, root mean square
    entries: Tensor  # (k,) of the change of one entry, at most

    def of_bins(self, layer: InsertedLayer) -> Blur:
        """A bin is the difference of two rows."""
        return Blur(norms=reach_of_bins(layer, self.norms.square()).sqrt(), entries=reach_of_bins(layer, self.entries))

    def at(self, places: Tensor) -> Blur:
        return Blur(norms=self.norms[places], entries=self.entries[places])

    def largest(self, count: int) -> Blur:
        """The largest of all, for each of `count` contents that come of any bins; none is occupied where nothing reaches the layer."""
        norms, entries = (values.amax() if len(values) else values.sum() for values in (self.norms, self.entries))
        return Blur(norms=norms.expand(count), entries=entries.expand(count))


@dataclass(frozen=True, kw_only=True)
class DecodedBins:
    """The samples that were found alone in a bin."""

    inputs: Tensor  # (n, d) float64
    weights: Tensor  # (n,) each sample's δ
    others: Tensor  # (m, d) quotients that lie in their own bins, and that nothing confirms
    occupied: int  # bins that still hold something afterwards
    residual: float  # the norm of what they hold, relative to the norm of all


def decode_bins(
    layer: InsertedLayer,
    weight_gradient: Tensor,
    bias_gradient: Tensor,
    normalization: Normalization,
    shape: tuple[int, ...],
    replay: Replayer | None,
    blur: Blur | None = None,
    samples: int | None = None,
    sums_may_pass: Callable[[Tensor], Tensor] | None = None,
) -> DecodedBins:
    """Read samples off the layer's gradient. A sample is claimed only if something besides its own bin confirms it.

    A bin holds (U, S) = Σ δ_i (x_i, 1). If it holds one sample, x = U/S. Any of these confirms x:

    - Its pixels lie on many of a picture's 256 levels, unlike mixtures, but for inputs of which `sums_may_pass`.
    - Bins of all functionals have the same content, so that their samples share all bins; and there are as many independent contents as
      `samples`, so that no two samples do.
    - The dependences between bins leave no other choice of bins for all samples together (`separate_all`).
    - The model gives x exactly the weight S (`replay`), and x lies in bins that one sample can lie in (`possible_places`), or the weight
      fits better still. Where the labels of several samples can cancel, the weight confirms nothing: a mixture of them and one more has
      the weight of one sample too.

    If some samples lie on levels, one off them is a mixture, unless noise hides its levels. Confirmed samples are subtracted from all
    bins. `separate_shared_bins` separates those that share all bins. Only levels or the exact weight confirm these. What the client's
    rounding and its defenses may have changed (`blur`) confirms nothing.
    """
    bins = _Bins(layer, weight_gradient, bias_gradient, normalization, shape, blur, samples)
    bins.sums_may_pass = sums_may_pass
    whole = float(bins.contents.norm())
    found: list[Tensor] = []
    contents, places = bins.separate_all()
    if len(contents):
        found.append(bins.subtract(contents, places))
    while True:
        contents, places, confirmed = bins.confirm_lone_samples(replay)
        if not bool(confirmed.any()):
            contents, places, confirmed = bins.confirm_shared_samples(replay)
        if not bool(confirmed.any()):
            break
        found.append(bins.subtract(contents[confirmed], places[confirmed]))
    contents = torch.cat(found) if found else bins.contents[:0]
    inputs = _quotients(contents)
    once = _are_first_copies(inputs)
    left = bins.are_occupied()
    return DecodedBins(
        inputs=inputs[once],
        weights=contents[once, -1],
        others=bins.unconfirmed(inputs[once]),
        occupied=int(left.sum()),
        residual=float(bins.contents[left].norm()) / whole if whole > 0 else 0.0,
    )


class _Bins:
    """The occupied bins of all functionals. Samples are taken out of them one by one."""

    def __init__(
        self,
        layer: InsertedLayer,
        weight_gradient: Tensor,
        bias_gradient: Tensor,
        normalization: Normalization,
        shape: tuple[int, ...],
        blur: Blur | None,
        samples: int | None,
    ) -> None:
        self.samples = samples
        self.sums_may_pass: Callable[[Tensor], Tensor] | None = None  # of inputs (n, *shape), such as sums of samples
        self.layer, self.shape, self.normalization = layer, shape, normalization
        self.few_levels = False  # whether the pictures are seen to use few levels
        self.pictures = False  # whether any content is seen to lie on levels
        inner, outer = bin_gradients(layer, weight_gradient, bias_gradient)
        rows = weight_gradient.norm(dim=1).double().square() + bias_gradient.double().square()
        self.noise = 4 * torch.finfo(weight_gradient.dtype).eps * float(rows.max().sqrt())
        sizes = torch.hypot(inner.norm(dim=1).double(), outer.double())  # a black sample shows in the bias alone
        occupied = (sizes > self.noise).nonzero().flatten()
        self.contents = torch.cat([inner[occupied].double(), outer[occupied, None].double()], 1)  # (m, d + 1)
        sharp = torch.zeros_like(self.contents[:, 0])
        self.blur = Blur(norms=sharp, entries=sharp) if blur is None else blur.of_bins(layer).at(occupied)  # (m,)
        self.agreement_counts = not bool(self.blur.norms.isinf().any())
        self.rank, self.null = dependences(self.contents, self.noise, math.sqrt(2) * float(self.blur.norms.norm()), samples)
        self.row_of = torch.full((sum(layer.bins),), -1, device=occupied.device)
        self.row_of[occupied] = torch.arange(len(occupied), device=occupied.device)
        starts = torch.tensor([0, *layer.bins], device=occupied.device).cumsum(0)
        self.starts = starts[:-1]
        self.functional_of = torch.bucketize(occupied, self.starts, right=True) - 1  # (m,)
        first = layer.rows.weight.detach()[self.starts].double()  # (F, d); every row is a multiple of its functional's first
        self.functionals = first
        counts = torch.tensor(layer.bins, device=occupied.device)
        sizes = layer.rows.weight.detach().norm(dim=1).double() / first.norm(dim=1).repeat_interleave(counts)
        self.edges = (-layer.rows.bias.detach().double() / sizes).split(layer.bins)
        low, high = input_bounds(normalization, self.contents.new_zeros(1, *shape))
        self.level = float((high - low).min()) / LARGEST_LEVEL
        self.low = (low - RANGE_SLACK * (high - low)).expand(1, *shape).flatten()
        self.high = (high + RANGE_SLACK * (high - low)).expand(1, *shape).flatten()

    def separate_all(self) -> tuple[Tensor, Tensor]:
        """What all samples of the batch add (n, d + 1), and their places (n, F); none unless the bins prove all of them."""
        nothing = self.contents[:0], self.row_of.new_zeros(0, len(self.layer.bins))
        if not self._is_shared_by_none() or self.samples is None or len(self.functional_of.unique()) < len(self.layer.bins):
            return nothing
        given = separate_all(self.contents, self.functional_of, self.null, self.samples)
        if given is None:
            return nothing
        contents, places = given
        inside, fitting = self._places_of(contents)
        sound = inside & (places == fitting).all(1) & self._are_clear(contents, self.blur.largest(len(contents)))
        sound &= contents.norm(dim=1) > CLAIM_MARGIN * self.noise
        return (contents, places) if bool(sound.all()) else nothing

    def confirm_lone_samples(self, replay: Replayer | None) -> tuple[Tensor, Tensor, Tensor]:
        """Contents (n, d + 1) that may be one sample each, their places (n, F), and which of them are confirmed (n,)."""
        rows, places = self._candidates()
        contents, blur = self.contents[rows], self.blur.at(rows)
        confirmed = self._are_single_pictures(contents, blur)
        self.pictures |= bool(self._are_near_levels(contents).any())
        if not bool(confirmed.any()) and len(rows):
            alike = self._count_agreeing_functionals(rows, places) == places.shape[1] - 1
            confirmed = alike & self._is_shared_by_none() & self._confirmable(contents, blur)
            if replay is not None and not replay.labels_can_cancel():
                if not replay.shares:
                    self._calibrate(replay, contents, blur, alike)
                confirmed |= self._have_replayed_weights(contents, blur, possible_places(self.null, places), replay)
        return contents, places, confirmed

    def confirm_shared_samples(self, replay: Replayer | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same of samples that share all their bins with others."""
        contents, places = self._separate_shared()
        blur = self.blur.largest(len(contents))
        confirmed = self._are_single_pictures(contents, blur)
        if replay is not None and not replay.labels_can_cancel() and not bool(confirmed.any()):
            unknown = torch.zeros(len(contents), dtype=torch.bool, device=contents.device)
            confirmed = self._have_replayed_weights(contents, blur, unknown, replay)
        return contents, places, confirmed

    def subtract(self, contents: Tensor, places: Tensor) -> Tensor:
        """Subtract each confirmed sample once from the bins that it lies in. Returns what was subtracted: (n, d + 1)."""
        first = _first_of_each(places)
        taken = contents[first]
        for column in places[first].T:
            self.contents.index_add_(0, column, -taken)
        return taken

    def are_occupied(self) -> Tensor:
        """Which bins still hold more than rounding noise: (m,)."""
        return self.contents.norm(dim=1) > EMPTY_BIN * self.noise

    def unconfirmed(self, found: Tensor) -> Tensor:
        """The quotients that may be samples beside those that were found (n, d), the clearest first: (m, d)."""
        rows = self._candidates()[0]
        order = self.contents[rows].norm(dim=1).argsort(descending=True, stable=True)
        everything = torch.cat([found, _quotients(self.contents[rows[order]])])
        return everything[len(found) :][_are_first_copies(everything)[len(found) :]]

    def _candidates(self) -> tuple[Tensor, Tensor]:
        """Bins whose quotient lies in that very bin, and in an occupied bin of every functional: (n,), (n, F)."""
        rows = (self.contents.norm(dim=1) > CLAIM_MARGIN * self.noise).nonzero().flatten()
        inside, places = self._places_of(self.contents[rows])
        sound = inside & (places == rows[:, None]).any(1)
        return rows[sound], places[sound]

    def _separate_shared(self) -> tuple[Tensor, Tensor]:
        """Contents (n, d + 1) of samples that share all their bins with others, and their places (n, F)."""
        rows = self.are_occupied().nonzero().flatten()
        if len(self.functional_of[rows].unique()) < len(self.layer.bins):  # rounding hides what samples add to a functional's bins
            rows = rows[:0]
        contents, places = separate_shared_bins(self.contents[rows], self.functional_of[rows], self.noise)
        sound = contents.norm(dim=1) > CLAIM_MARGIN * self.noise
        contents, places = contents[sound], rows[places[sound]]
        inside, fitting = self._places_of(contents)
        sound = inside & (places == fitting).all(1) if len(places) else inside
        return contents[sound], places[sound]

    def _places_of(self, contents: Tensor) -> tuple[Tensor, Tensor]:
        """Whether quotients lie in the data range and in occupied bins (n,), and in which row of each functional (n, F)."""
        inputs = _quotients(contents)
        inside = ((inputs >= self.low) & (inputs <= self.high)).all(1)
        values = inputs @ self.functionals.T  # (n, F)
        bins = torch.stack([torch.searchsorted(edges, column.contiguous()) - 1 for edges, column in zip(self.edges, values.T)], 1)
        counts = torch.tensor(self.layer.bins, device=bins.device)
        places = self.row_of[self.starts + bins.clamp_min(0).minimum(counts - 1)]  # (n, F)
        inside &= (bins >= 0).all(1) & (places >= 0).all(1) & self.are_occupied()[places].all(1)
        return inside, places

    def _count_agreeing_functionals(self, rows: Tensor, places: Tensor) -> Tensor:
        """How many other functionals' bins hold the same content: (n,)."""
        own = self.contents[rows]
        tolerance = SAME_CONTENT * own.norm(dim=1) + self.noise
        same = torch.stack([(self.contents[column] - own).norm(dim=1) <= tolerance for column in places.T], 1)
        return (same & (places != rows[:, None])).sum(1)

    def _is_shared_by_none(self) -> bool:
        """Whether no two samples share all bins, so that bins of all functionals with the same content hold one sample.

        Bins with the same content hold the same samples. Samples that share all bins add one direction to the contents together, so that
        their rank falls short of the number of samples.
        """
        return self.agreement_counts and self.samples is not None and self.rank >= self.samples

    def _calibrate(self, replay: Replayer, contents: Tensor, blur: Blur, alike: Tensor) -> None:
        """Let the replay find its unknown share: in samples that are proved by their bins, which are `alike` (n,); or a size in any."""
        chosen = self._are_clear(contents, blur) & (alike | (replay.batch_size is None))
        if bool(chosen.any()) and (self._is_shared_by_none() or (self.agreement_counts and replay.batch_size is None)):
            first = chosen.nonzero().flatten()
            first = first[_are_first_copies(_quotients(contents[first]))]
            rounding = self._rounding(contents[first], blur.at(first)).clamp_min(replay.least)
            replay.calibrate(_quotients(contents[first]), contents[first, -1], rounding)

    def _are_single_pictures(self, contents: Tensor, blur: Blur) -> Tensor:
        """Whether the quotients of contents (n, d + 1) are pictures by their levels: (n,)."""
        inputs = _quotients(contents).reshape(-1, *self.shape)
        self.few_levels |= have_few_levels(inputs, self.normalization)
        sharp = blur.entries < LEVEL_REACH * self.level * contents[:, -1].abs()
        shown = sharp & are_single_pictures(inputs, self.normalization, self._errors(contents), few=self.few_levels)
        if self.sums_may_pass is not None:
            shown[shown.clone()] &= ~self.sums_may_pass(inputs[shown])
        return shown

    def _are_near_levels(self, contents: Tensor) -> Tensor:
        """Whether the quotients of contents (n, d + 1) lie on levels, perhaps by chance: (n,)."""
        return are_near_levels(_quotients(contents).reshape(-1, *self.shape), self.normalization)

    def _are_off_levels(self, contents: Tensor) -> Tensor:
        """Whether the quotients of contents (n, d + 1) lie off levels that their rounding noise cannot hide: (n,)."""
        return ~self._are_near_levels(contents) & levels_are_visible(self._errors(contents), self.low, self.high)

    def _rounding(self, contents: Tensor, blur: Blur) -> Tensor:
        """By how much, relatively, the weights of contents (n, d + 1) may be off: (n,)."""
        return WEIGHT_ROUNDINGS * (self.noise + blur.norms) / contents[:, -1].abs()

    def _confirmable(self, contents: Tensor, blur: Blur) -> Tensor:
        """Which contents (n, d + 1) something besides levels may confirm: all that no defense blurs, or among pictures those on levels."""
        return (self._are_near_levels(contents) | (not self.pictures)) & self._are_clear(contents, blur)

    def _are_clear(self, contents: Tensor, blur: Blur) -> Tensor:
        """Which contents (n, d + 1) stand far above what the client's rounding and its defenses may have changed."""
        return contents.norm(dim=1) > CLAIM_MARGIN * blur.norms

    def _have_replayed_weights(self, contents: Tensor, blur: Blur, possible: Tensor, replay: Replayer) -> Tensor:
        """Which contents (n, d + 1) have the weight that the model gives their inputs, but for rounding: (n,).

        Where dependences between bins do not show the places to be `possible` (n,), the weight must fit so well that no label fits a
        mixture by chance.
        """
        confirmed, chosen = torch.zeros_like(possible), self._confirmable(contents, blur)
        if replay.shares and bool(chosen.any()):
            weights = contents[chosen, -1]
            rounding, exact, surest = (
                self._rounding(contents[chosen], blur.at(chosen)),
                replay.exact / len(replay.shares),
                replay.surest / len(replay.shares),
            )
            allowed = torch.where(possible[chosen], rounding.clamp(min(replay.least, exact), exact), rounding.clamp_max(surest))
            confirmed[chosen] = replay(_quotients(contents[chosen]), weights) <= allowed
        return confirmed

    def _errors(self, contents: Tensor) -> Tensor:
        """The root mean square of the rounding noise in each quotient: (n,)."""
        return self.noise / (contents[:, -1].abs() * (contents.shape[1] - 1) ** 0.5)


def bin_gradients(layer: InsertedLayer, weight_gradient: Tensor, bias_gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Each bin's part of the gradients: (k, d) and (k,). Bin l holds what activates row l and not row l + 1 (Fowl et al., Eq. 6)."""
    if layer.sparse:  # a row answers inside its own bin alone
        return weight_gradient, bias_gradient
    parts = []
    for gradient in (weight_gradient, bias_gradient):
        ended = (torch.cat([part, torch.zeros_like(part[:1])]) for part in gradient.split(layer.bins))
        parts.append(torch.cat([part[:-1] - part[1:] for part in ended]))
    return parts[0], parts[1]


def reach_of_bins(layer: InsertedLayer, reach: Tensor) -> Tensor:
    """By how much bins (k, ...) may be off, where the rows are off by `reach` (k, ...)."""
    if layer.sparse:
        return reach
    ended = (torch.cat([part, torch.zeros_like(part[:1])]) for part in reach.split(layer.bins))
    return torch.cat([part[:-1] + part[1:] for part in ended])


def _quotients(contents: Tensor) -> Tensor:
    """x = U/S of contents (U, S): (n, d)."""
    return contents[:, :-1] / contents[:, -1:]


def _are_first_copies(inputs: Tensor) -> Tensor:
    """Which samples (n, d) repeat no earlier one. What a faint sample leaves in two bins must not count twice."""
    if len(inputs) == 0:
        return torch.zeros(0, dtype=torch.bool, device=inputs.device)
    apart = torch.cdist(inputs, inputs, compute_mode="use_mm_for_euclid_dist")
    return ~torch.tril(apart <= SAME_SAMPLE * inputs.norm(dim=1), -1).any(1)


def _first_of_each(places: Tensor) -> Tensor:
    """The index of the first of each distinct row of `places`."""
    distinct, inverse = torch.unique(places, dim=0, return_inverse=True)
    order = torch.arange(len(places), device=places.device)
    return torch.full((len(distinct),), len(places), device=places.device).scatter_reduce(0, inverse, order, "amin")
