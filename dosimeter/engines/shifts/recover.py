"""From one layer's gradient to its samples' maps, with certificates and error bars."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dosimeter.client.training import sends_mean_gradient
from dosimeter.engines.premises import premises_of
from dosimeter.engines.shifts.convolutions import ConvolutionLayer, find_convolutions
from dosimeter.engines.shifts.grouped import read_groups
from dosimeter.engines.shifts.head_samples import unmix_by_head
from dosimeter.engines.shifts.joining import find_trunk, join, pair
from dosimeter.engines.shifts.judging import LARGEST_MISFIT, LARGEST_NOISE_SHARE, MISFIT_SLACK, LayerMaps, error_bars, judge
from dosimeter.engines.shifts.layout import Layout, NoLayout, Rank, read_layout, read_rank
from dosimeter.engines.shifts.scales import find_scales, slopes_of
from dosimeter.engines.shifts.unmixing import NEGATIVE_NOISES, Samples, one_sample, unmix
from dosimeter.engines.subspace.distortion import distortion_of
from dosimeter.engines.subspace.spectrum import noise_edge, rounding_unit
from dosimeter.engines.weight_rounding import rounding_of_weights
from dosimeter.interfaces import Exposure, Public
from dosimeter.progress import advance
from dosimeter.types import JoinedSamples, MapEstimate, MapLayer, Outcome, Refused

CARRIED_ERROR = 10.0  # by how much layers behind may enlarge the maps' errors
LAYERS_NAMED = 3  # beside the roomiest one, where no layer shows its maps
SCALE_SLACK = 8.0  # errors of slopes are common to many equations
ZERO_NOISES = 50.0  # entries within as many standard deviations of zero are the ReLU's zeros


def recover_maps(exposure: Exposure, layer: str | None = None, *, seed: int = 0) -> MapEstimate:
    """The activation maps of the whole batch at the input of a convolution or a hidden linear layer, in their spatial order.

    Ours. The gradient of a convolution is Dᵀ S_o A, with S_o the shifts of the grid (see `layout`). Its spectrum tells the batch size,
    its shifts the layout, the zeros of the ReLU the samples (see `unmixing`), and bias gradients their scale (see `scales`). Behind other
    activations the head's proved features tell both (see `head_samples`).
    Without `layer`, layers are tried from the input on, until all samples of one are certified. A certificate holds for one gradient of
    one batch whose entries nobody changed.
    """
    convolutions = find_convolutions(exposure)
    chosen = [one for one in convolutions if layer in (None, one.name)]
    if not chosen:
        names = ", ".join(one.name for one in convolutions)
        there = f"there are: {names}" if names else "the update has none (2D convolutions and hidden linear layers are read)"
        which = "any layer" if layer is None else f"a layer {layer!r}"
        raise Refused(f"maps: the client sent no gradient of {which} that has maps; {there}")
    doubt = doubt_of_maps(exposure.public)
    best: tuple[ConvolutionLayer, LayerMaps] | None = None
    tried: list[MapLayer] = []
    for number, one in enumerate(chosen):
        advance(number, len(chosen), f"reading {one.name or 'the layer'}")
        found, rank, reason = None, None, ""
        whole = best is not None and bool(best[1].certified.all())
        try:
            if whole:
                rank, reason = _rank(exposure, one), "not read, since a layer before it shows every sample"
            else:
                found = recover_layer(exposure, one, batch_size=exposure.public.batch_size, seed=seed)
                rank = found.layout.rank
        except NoLayout as refusal:
            reason = str(refusal)
        tried.append(_tried(one, rank, 0 if found is None or doubt else int(found.certified.sum()), reason))
        if found is not None and (best is None or int(found.certified.sum()) > int(best[1].certified.sum())):
            best = one, found
    if best is None:
        readable = [one for one, shape in zip(tried, chosen) if not shape.obstacle]
        said = _refusal(tried, max(readable or tried, key=lambda one: one.most_samples))
        raise Refused(said, details={"layers": describe_layers(tried)})
    where, found = best
    doubt = doubt or doubt_of_size(exposure.public, len(found.maps))
    samples = None
    if not doubt and bool(found.certified.all()):
        samples = _join(exposure, where, found, convolutions, seed)
        doubt = "" if samples is None else _disagreement(exposure, where, found, samples, convolutions)
    certified = torch.zeros_like(found.certified) if doubt else found.certified
    return MapEstimate(
        maps=found.maps,
        layer=where.name,
        layers=tuple(tried),
        batch_size=len(found.maps),
        certified=certified,
        error_bars=found.error_bars,
        samples=None if doubt else samples,
        premises=premises_of(exposure.public) if bool(certified.any()) else (),
        outcome=Outcome.COMPLETED if bool(certified.all()) else Outcome.PARTIAL,
        message=doubt,
    )


def _join(
    exposure: Exposure, where: ConvolutionLayer, found: LayerMaps, layers: Sequence[ConvolutionLayer], seed: int
) -> JoinedSamples | None:
    """What follows of each sample from its maps, or from those of the next layer that leads to the head; None where none does."""
    later = layers[[one.name for one in layers].index(where.name) + 1 :]
    trunk = find_trunk(exposure, where, len(found.maps))
    if trunk is not None:
        return join(trunk, found.maps, later)
    reading = [index for index, one in enumerate(later) if one.weight.shape[1] == where.weight.shape[0]]
    if not reading or later[reading[0]].obstacle or later[reading[0]].most_samples < len(found.maps):
        return None
    layer = later[reading[0]]
    trunk = find_trunk(exposure, layer, len(found.maps))
    if trunk is None:
        return None
    try:
        behind = recover_layer(exposure, layer, batch_size=exposure.public.batch_size, seed=seed)
    except NoLayout:
        return None
    certain = len(behind.maps) == len(found.maps) and bool(behind.certified.all())
    order = pair(where, found.maps, found.slopes, behind.maps) if certain else None
    if order is None:
        return None
    joined = join(trunk, behind.maps[order], later[reading[0] + 1 :])
    return replace(joined, maps={layer.name: behind.maps[order], **joined.maps})


def _disagreement(
    exposure: Exposure, where: ConvolutionLayer, found: LayerMaps, samples: JoinedSamples, layers: Sequence[ConvolutionLayer]
) -> str:
    """Which layer's gradient the samples do not explain, beyond the noise and their error bars; "" where they explain all."""
    gradients = {one.name: one.gradient for one in layers}
    for name, misfit in samples.misfits.items():
        gradient = gradients.get(name)
        gradient = exposure.update[f"{name}.weight" if name else "weight"] if gradient is None else gradient
        noise = max(found.layout.rank.noise, _noise_in(exposure, name, gradient))
        share = noise / float(gradient.double().square().mean().sqrt())
        allowed = math.hypot(LARGEST_MISFIT, MISFIT_SLACK * share) + CARRIED_ERROR * float(found.error_bars.max())
        if misfit > allowed and share < LARGEST_NOISE_SHARE:
            return f"guesses only: the maps of {where.name}, carried on to {name}, leave {misfit:.1g} of its gradient unexplained"
    return ""


def _rank(exposure: Exposure, layer: ConvolutionLayer) -> Rank:
    if layer.obstacle:
        raise NoLayout(layer.obstacle)
    noise = _noise_of(exposure, layer)
    return read_rank(
        layer.gradient[: layer.widths[0]],
        layer.reads,
        unit=rounding_unit(layer.gradient),
        noise=noise,
        batch_size=exposure.public.batch_size,
    )


def _noise_of(exposure: Exposure, layer: ConvolutionLayer) -> float:
    """The standard deviation of an entry's error beside the rounding of the gradient itself."""
    return _noise_in(exposure, layer.name, layer.gradient)


def _noise_in(exposure: Exposure, layer: str, gradient: Tensor) -> float:
    name = f"{layer}.weight" if layer else "weight"
    rounding = float(rounding_of_weights(exposure.model.get_parameter(name), exposure.update[name], exposure.public).square().mean().sqrt())
    return math.hypot(declared_noise(gradient, exposure.public), rounding)


def declared_noise(change: Tensor, public: Public) -> float:
    """The standard deviation of an entry's error by what the defenses in force say, 0 where they say nothing."""
    known = distortion_of(change, public)
    if known is None:
        return 0.0
    hidden = torch.where(known.live, 0, known.high - known.low)  # an entry that was emptied lies somewhere between its bounds
    spread = float(torch.where(hidden.isfinite(), hidden, 0).double().square().mean().div(12))
    return math.hypot(known.noise, math.sqrt(spread))


def _tried(layer: ConvolutionLayer, rank: Rank | None, certified: int, reason: str) -> MapLayer:
    hiding = 0.0 if rank is None else rank.largest * rank.smallest_kept / noise_edge(1.0, layer.gradient[:, 0].numel(), layer.widths[1])
    return MapLayer(
        name=layer.name,
        positions=layer.positions,
        most_samples=layer.most_samples,
        certified=certified,
        reason=reason,
        channels=layer.channels,
        seen=0 if rank is None else rank.positions,
        gap=0.0 if rank is None else rank.gap,
        hiding_noise=hiding,
        hiding_share=hiding / float(layer.gradient.double().square().mean().sqrt()) if hiding else 0.0,
    )


def describe_layers(layers: Sequence[MapLayer]) -> list[dict[str, Any]]:
    """What a record keeps of each layer that was tried."""
    return [
        {
            "name": one.name,
            "positions": one.positions,
            "channels": one.channels,
            "largest_batch": one.most_samples,
            "positions_seen": one.seen,
            "gap": one.gap if math.isfinite(one.gap) else None,
            "hiding_noise": one.hiding_noise,
            "hiding_share": one.hiding_share,
            "certified": one.certified,
            "reason": one.reason,
        }
        for one in layers
    ]


def _refusal(tried: Sequence[MapLayer], roomiest: MapLayer) -> str:
    """Why no layer shows its maps: the layer with the most room first, then some of the others."""
    room = f"room for at most {roomiest.most_samples} samples" if roomiest.most_samples else "no room for a single sample"
    if len(tried) == 1:
        return f"{roomiest.name or 'the layer'}, with {room}, does not show its maps: {roomiest.reason}"
    others = [f"{one.name}: {one.reason}" for one in tried if one is not roomiest]
    more = f", and {len(others) - LAYERS_NAMED} more layers" if len(others) > LAYERS_NAMED else ""
    rest = f". Also {'; '.join(others[:LAYERS_NAMED])}{more}" if others else ""
    return f"no layer shows its maps. {roomiest.name}, the layer with the most room, has {room}: {roomiest.reason}{rest}"


def doubt_of_maps(public: Public) -> str:
    """Why nothing is certified here, "" where the update is one gradient as training gave it."""
    if not sends_mean_gradient(public):
        return f"guesses only: the update sums gradients of {public.training.name}'s local steps"
    changing = [one.name for one in public.defenses if (one.distorts() and not one.is_modelled()) or one.scaling() in ("layers", "unknown")]
    if changing:
        return f"guesses only: {', '.join(changing)} may change the gradient's entries"
    return ""


def doubt_of_size(public: Public, found: int) -> str:
    """Why nothing is certified where fewer maps are found than the declared size says, else ""."""
    declared = public.batch_size
    if declared is None or found >= declared:
        return ""
    return f"guesses only: {found} maps explain the gradient of {declared} samples, so that a map may be the mean of several"


def recover_layer(exposure: Exposure, layer: ConvolutionLayer, *, batch_size: int | None, seed: int = 0) -> LayerMaps:
    """Read the maps of one layer; refuses with the reason where its gradient does not show them."""
    if layer.obstacle:
        raise NoLayout(layer.obstacle)
    unit = rounding_unit(layer.gradient)
    noise = _noise_of(exposure, layer)
    if layer.groups > 1:
        return _recover_groups(exposure, layer, noise=noise, batch_size=batch_size)
    layout = read_layout(layer.gradient, layer.reads, unit=unit, noise=noise, batch_size=batch_size)
    if not layer.non_negative and len(layout.maps) > 1:
        return _recover_by_head(exposure, layer, layout, batch_size=batch_size, seed=seed)
    mixtures, errors = layout.maps.flatten(1), layout.disagreement.flatten(1)
    samples = unmix(mixtures, errors, seed) if layer.non_negative else one_sample(mixtures)
    if len(samples.mixing) < len(mixtures):
        raise NoLayout(
            f"{len(samples.mixing)} of {len(mixtures)} samples come out of the mixture, and the rest leaves them undetermined"
            + _why_doubtful(samples)
        )
    maps = (samples.mixing @ mixtures).reshape(layout.maps.shape)
    errors = (samples.mixing @ errors).reshape(layout.maps.shape)
    if layer.non_negative:
        noise = errors.square().mean((1, 2), keepdim=True).sqrt()
        maps = torch.where(maps > ZERO_NOISES * noise, maps, 0)
    return _scaled(exposure, layer, layout, maps, errors, samples.errors, samples.certain, batch_size=batch_size)


def _why_doubtful(samples: Samples) -> str:
    """Samples that hardly differ are zero in the same entries, and few of these tell one from a mixture."""
    if samples.doubtful is None:
        return ""
    witnesses, wanted = samples.doubtful
    return (
        f": {witnesses} zeros beyond the noise tell the next one from its mixtures, and a proof takes {wanted:.0f}, so alike are the maps"
    )


def _scaled(
    exposure: Exposure,
    layer: ConvolutionLayer,
    layout: Layout,
    maps: Tensor,
    errors: Tensor,
    of_direction: Tensor,
    certain: Tensor,
    *,
    batch_size: int | None,
) -> LayerMaps:
    """Maps with the factors that a bias gradient tells."""
    slopes = slopes_of(layer, maps)
    scales = find_scales(exposure, layer, maps, slopes)
    if scales is None:
        raise NoLayout("no bias gradient of the update tells how large the maps are")
    of_scale = torch.hypot(SCALE_SLACK * scales.errors, of_direction.to(maps))
    bars = error_bars(maps, errors, of_scale, rounding_unit(layer.gradient))
    factors = scales.factors[:, None, None]
    return judge(layer, layout, maps * factors, slopes / factors, bars, certain.to(bars.device), scales.source, batch_size=batch_size)


def _recover_groups(exposure: Exposure, layer: ConvolutionLayer, *, noise: float, batch_size: int | None) -> LayerMaps:
    """One sample's maps from the parts that each group shows."""
    parts = read_groups(layer, unit=rounding_unit(layer.gradient), noise=noise, batch_size=batch_size)
    maps, errors = parts.layout.maps, parts.layout.disagreement
    certain = torch.ones(len(maps), dtype=torch.bool)
    if layer.non_negative:
        signs = maps.sum((1, 2), keepdim=True).sign()
        maps, errors = signs * maps, signs * errors
        deviation = errors.square().mean((1, 2), keepdim=True).sqrt() * layer.groups**0.5  # errors are zero outside of a group
        certain = (maps >= -NEGATIVE_NOISES * deviation).all(2).all(1)
        maps = torch.where(maps > ZERO_NOISES * deviation, maps, 0)
    none = torch.zeros(len(maps), dtype=torch.float64)
    size = None if batch_size is None else len(maps)
    found = _scaled(exposure, parts.layer, parts.layout, maps, errors, none, certain, batch_size=size)
    return replace(
        found,
        maps=found.maps.sum(0, keepdim=True),
        slopes=found.slopes.sum(0, keepdim=True),
        certified=found.certified.all(0, keepdim=True),
        error_bars=found.error_bars.amax(0, keepdim=True),
    )


def _recover_by_head(exposure: Exposure, layer: ConvolutionLayer, layout: Layout, *, batch_size: int | None, seed: int) -> LayerMaps:
    """The maps of a layer whose inputs can be negative, by the features that the head's gradient proves."""
    samples = unmix_by_head(exposure, layer, layout.maps, seed)
    mixtures, errors = layout.maps.flatten(1), layout.disagreement.flatten(1)
    maps, errors = ((samples.mixing @ part).reshape(layout.maps.shape) for part in (mixtures, errors))
    bars = error_bars(maps, errors, samples.errors, rounding_unit(layer.gradient))
    certain = torch.ones(len(maps), dtype=torch.bool, device=maps.device)
    return judge(layer, layout, maps, slopes_of(layer, maps), bars, certain, "the head's samples", batch_size=batch_size)
