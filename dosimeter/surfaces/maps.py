"""Maps: what a convolution inside the model receives, one stack of maps a sample."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dosimeter.engines.shifts.recover import describe_layers
from dosimeter.interfaces import Exposure
from dosimeter.metrics.map_error import MapError
from dosimeter.numbers import significant
from dosimeter.registry import MAPS
from dosimeter.surfaces.layer_inputs import LARGEST_CERTIFIED_ERROR, beats_nulls, can_refute, judge_errors, may_leak, reader_of, score_layer
from dosimeter.surfaces.pictures import MOST_PICTURES, png, score_of, strips
from dosimeter.surfaces.scores import SAMPLE_NULLS, Comparison, Scores, Values, in_truths_order, keep_finite
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, MapEstimate

SHOWN_CHANNELS = 16  # of each sample, as a square of small pictures: the channels with the largest entries
SHOWN_LAYERS = 6  # with room for a sample, in the report's lines
PIXELS_PER_MAP = 48  # the side of one map in a picture, at least


@SURFACES.register("maps")
class Maps(Surface[MapEstimate]):
    """What a layer inside the model sees of each sample, in place."""

    position = 30
    reads = ("numbers", "regressions", "grids")
    estimate = MapEstimate
    methods = MAPS
    key = plural = "maps"
    headline = "map_error"
    plot = "errors"
    takes_labels = False
    gate_waits = False  # most layers and many models show no maps; what maps would give away are inputs, which the gate waits for
    grid_methods: ClassVar = {"shifts": {}}

    description = (
        "What a layer inside the model sees of each sample: many small pictures of where in the sample something is. They keep the "
        "sample’s layout, and the sample can often be computed from them."
    )
    if_leaked = "The server can compute what a layer of the model saw of single private samples, position by position."
    if_not_shown = "What was tried here came no closer to the private activation maps than its nulls. That is no proof of safety."
    null_words: ClassVar = SAMPLE_NULLS | {"zero": ("zero", "maps of zeros, which need no knowledge at all")}
    without_ceiling = "the bounds on inputs limit no single function of an input, which noise may leave whole"
    share_words = "the share with less than half of every null’s error"

    def score(self, found: MapEstimate, comparison: Comparison) -> Scores:
        return score_maps(found, comparison)

    def judge(self, found: MapEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        counted = f"samples' activation maps at {_named(found.layer)}"
        return judge_errors("map", counted, scores, certified=int(found.certified.sum()), attempts=attempts)

    def may_leak(self, found: MapEstimate, scores: Scores) -> bool:
        return may_leak("map", scores, int(found.certified.sum()))

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def proves(self, found: MapEstimate) -> bool:
        return bool(found.certified.any())

    def proof(self, found: MapEstimate) -> str:
        certified, where = int(found.certified.sum()), f"at the input of {_named(found.layer)}"
        return f"the maps of {certified} of {len(found.maps)} samples {where} certified from the update alone" if certified else ""

    def proved_samples(self, found: MapEstimate, scores: Scores) -> list[bool]:
        return in_truths_order(found.certified, scores.assignment)

    def without_proof(self, found: MapEstimate, message: str) -> MapEstimate:
        return replace(found, certified=torch.zeros_like(found.certified), premises=(), message=message)

    def count_guesses(self, found: MapEstimate) -> int:
        return len(keep_finite(found.maps))

    def merge(self, estimates: Sequence[MapEstimate], count: int) -> MapEstimate:
        """The maps of one layer, since those of several cannot be compared: of the layer that shows most samples."""
        by_layer: dict[str, list[Tensor]] = {}
        for estimate in estimates:
            by_layer.setdefault(estimate.layer, []).append(keep_finite(estimate.maps))
        layer, found = max(by_layer.items(), key=lambda item: sum(map(len, item[1])))
        maps = torch.cat(found)[:count]
        bare = torch.zeros(len(maps), dtype=torch.bool, device=maps.device)
        bars = torch.full((len(maps),), torch.nan, device=maps.device)
        return replace(
            estimates[0], layer=layer, maps=maps, batch_size=len(maps), certified=bare, error_bars=bars, samples=None, premises=()
        )

    def details(self, found: MapEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        joined = found.samples
        return {
            "certified": int(found.certified.sum()),
            "batch_size": found.batch_size,
            "layer": found.layer,
            "shape": list(found.maps.shape[1:]),
            "layers": describe_layers(found.layers),
            "joined": None if joined is None else {"layers": list(joined.maps), "labels": joined.labels is not None},
        }

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        certified, false = details.get("certified"), details.get("false_certificates")
        if isinstance(details.get("layer"), str) and isinstance(details.get("shape"), list):
            facts.append(f"the input of {_named(details['layer'])}, {' × '.join(map(str, details['shape']))} numbers a sample")
        if isinstance(certified, int):
            facts.append(f"{certified} certified from the gradient alone" + (f", {false} of them wrongly" if false else ""))
        if details.get("batch_size") is not None:
            facts.append(f"batch size {details['batch_size']} read off the gradient")
        joined = details.get("joined")
        if isinstance(joined, Mapping):
            facts.append(f"each map joined with its sample's feature{' and label' if joined.get('labels') else ''}")
        layers = _layers(details)
        roomy = [one for one in layers if one.get("largest_batch")]
        without = _without_room([one for one in layers if not one.get("largest_batch")])
        return [*facts, *map(_room, roomy[:SHOWN_LAYERS]), *without]

    def advice(self, details: Sequence[Mapping[str, Any]]) -> list[str]:
        """From the shapes of all layers that any method read, and from how clearly their spectra stand out."""
        layers = [layer for one in details for layer in _layers(one)]
        most = max((int(one.get("largest_batch") or 0) for one in layers), default=0)
        if not most:
            return []
        said = [
            f"A batch of more than {most} sample{'s' if most > 1 else ''} has more positions than any layer of this model can tell apart, "
            "which stops the activation maps at no price in the update. Another norm in the place of batch norm does not stop them."
        ]
        clearest = max(layers, key=lambda one: float(one.get("hiding_noise") or 0))
        if noise := float(clearest.get("hiding_noise") or 0):
            share = float(clearest.get("hiding_share") or 0)
            said.append(
                f"Noise with a standard deviation of {noise:.1g} on each entry, {significant(share)} of an entry’s root mean square, "
                f"drowns the weakest direction of {_named(clearest['name'])}, the layer that shows its maps most clearly."
            )
        return said

    def evidence(self, found: MapEstimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        if comparison is None or scores is None or comparison.exposure is None:
            return [_show_map(maps, None, i) for i, maps in enumerate(found.maps[:MOST_PICTURES].detach())]
        true = reader_of(comparison.exposure, found.layer, as_maps)(comparison.truth.inputs)
        assert scores.assignment is not None
        return [
            _show_map(found.maps[partner].to(true) if partner >= 0 else None, true[i], i, score_of(scores, "map_error", i))
            for i, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist())
        ]


def _named(layer: str) -> str:
    """The layer's name, which in a Sequential is a number, so that it reads as one."""
    return f"layer {layer}" if layer.replace(".", "").isdecimal() else layer


def _room(layer: Mapping[str, Any]) -> str:
    """One line of the table of layers: what its shapes allow, and what its spectrum shows."""
    shapes = f"{layer.get('positions')} positions a sample, {layer.get('channels')} channels"
    told = f"{layer['name']}: {shapes}, room for {layer['largest_batch']} samples"
    if layer.get("positions_seen"):
        gap = layer.get("gap")
        told += f", {layer['positions_seen']} positions seen" + (f" before a gap of {gap:.1g}" if isinstance(gap, float) else "")
    return f"{told}; {layer['reason']}" if layer.get("reason") else told


def _without_room(layers: Sequence[Mapping[str, Any]]) -> list[str]:
    """One line for all layers that show no map for the same reason, up to its numbers."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for one in layers:
        kinds.setdefault(re.sub(r"\d+", "", str(one.get("reason"))), []).append(one)
    told = []
    for alike in kinds.values():
        first, more = alike[0], len(alike) - 1
        others = f" and {more} layer{'s' if more > 1 else ''} like it" if more else ""
        told.append(f"{first.get('name')}{others}, no room for a sample: {first.get('reason')}")
    return told


def _layers(details: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [one for one in details.get("layers") or () if isinstance(one, Mapping)]


def score_maps(found: MapEstimate, comparison: Comparison) -> Scores:
    """Compare recovered maps with what the exposure's model computes from the private batch at the same layer."""
    exposure, foreign, truth = comparison.exposure, comparison.foreign, comparison.truth
    if exposure is None:
        raise ValueError("exposure: scoring maps needs the exposure they were recovered from, whose model gives the true ones")
    read = reader_of(exposure, found.layer, as_maps)
    true = read(truth.inputs)  # the whole batch at once, as batch norm in train mode saw it
    refused: dict[str, Any] = {}
    if foreign is not None and foreign.layer != found.layer:
        why = f"the same method shows the maps of another layer, {foreign.layer}, of a foreign gradient"
        foreign, refused = None, {"refused_nulls": {"foreign": why}}
    for path, estimate in (("found", found), ("foreign", foreign)):
        if estimate is not None and estimate.maps.shape[1:] != true.shape[1:]:
            raise ValueError(f"{path}.maps: expected (n, {', '.join(map(str, true.shape[1:]))}), got {tuple(estimate.maps.shape)}")
    scores = score_layer("maps", found.maps, true, None if foreign is None else foreign.maps, read, comparison)
    assert scores.assignment is not None
    counts = {"recovered": len(found.maps)}
    if can_refute(exposure):
        counts["false_certificates"] = int(false_certificates(found, true, scores.assignment).sum())
    return replace(scores, details=scores.details | counts | refused)


def as_maps(received: Tensor, layer: str) -> Tensor:
    """What a layer received as (B, C, H, W). A vector a sample is a grid of one position."""
    if received.ndim == 4:
        return received
    if received.ndim > 1 and received[0].numel() == received.shape[-1]:
        return received.reshape(len(received), -1, 1, 1)
    shape = ", ".join(map(str, received.shape[1:]))
    raise ValueError(f"{layer}: expected a layer that receives maps (B, C, H, W) or one vector a sample, got (B, {shape})")


def false_certificates(found: MapEstimate, true: Tensor, assignment: Tensor) -> Tensor:
    """Which recovered samples are certified and refuted by the truth: (n,) bool."""
    matched = (assignment >= 0).to(true.device)
    partners = assignment[assignment >= 0].to(true.device)
    errors = torch.full((len(found.maps),), torch.inf, dtype=torch.float64, device=true.device)
    errors[partners] = MapError()(found.maps.detach().to(true.device)[partners], true[matched])
    allowed = found.error_bars.to(errors).clamp(max=LARGEST_CERTIFIED_ERROR)
    return found.certified.to(true.device) & ~(errors <= allowed)


def _show_map(recovered: Tensor | None, true: Tensor | None, sample: int, score: float | None = None) -> Evidence:
    """The channels with the largest entries, true and recovered, on the true scale; without the truth, on their own.

    One number a channel is drawn as a strip, as features are.
    """
    scale = true if true is not None else recovered
    assert scale is not None
    if scale[0].numel() == 1:  # one number a channel, as linear layers receive
        known, drawn = strips([true, recovered]) if true is not None else (None, *strips([recovered]))
        return Evidence(kind="tiles", private=known, recovered=drawn, sample=sample, score=score)
    channels = scale.flatten(1).amax(1).topk(min(SHOWN_CHANNELS, len(scale))).indices
    brightest = scale[channels].amax((1, 2), keepdim=True).clamp(min=torch.finfo(scale.dtype).tiny)

    def tiles(maps: Tensor | None) -> str | None:
        return None if maps is None else png(_tiles(maps[channels] / brightest))

    return Evidence(kind="tiles", private=tiles(true), recovered=tiles(recovered), sample=sample, score=score)


def _tiles(maps: Tensor) -> Tensor:
    """(channels, H, W) as one picture, (1, rows·side, columns·side), with the maps side by side."""
    scale = max(1, -(-PIXELS_PER_MAP // max(maps.shape[1:])))
    large = maps.repeat_interleave(scale, 1).repeat_interleave(scale, 2)
    large = torch.nn.functional.pad(large, (1, 1, 1, 1), value=1.0)
    columns = math.ceil(math.sqrt(len(large)))
    missing = -len(large) % columns
    large = torch.cat([large, large.new_ones(missing, *large.shape[1:])])
    rows = large.reshape(-1, columns, *large.shape[1:])
    return rows.permute(0, 2, 1, 3).reshape(1, len(rows) * large.shape[1], columns * large.shape[2])
