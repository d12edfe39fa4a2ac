"""Maps: what a convolution inside the model receives, one stack of maps a sample."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from dosimeter.interfaces import Exposure
from dosimeter.network.probing import input_of
from dosimeter.registry import MAPS
from dosimeter.surfaces.features import beats_nulls
from dosimeter.surfaces.pictures import MOST_PICTURES, png
from dosimeter.surfaces.scores import SAMPLE_NULLS, Comparison, Nulls, Scores, Values, columns_of, median, number, score_samples
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, MapEstimate

LARGEST_CERTIFIED_ERROR = 1e-2  # a certificate is false beyond this error, or beyond its own error bar where that is smaller
AUXILIARY_PIECE = 64  # auxiliary samples that go through the model at a time
SHOWN_CHANNELS = 16  # of each sample, as a square of small pictures: the channels with the largest entries
PIXELS_PER_MAP = 48  # the side of one map in a picture, at least


@SURFACES.register("maps")
class Maps(Surface[MapEstimate]):
    """What a layer inside the model sees of each sample, in place."""

    position = 30
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
    share_words = "the share with less than half of every null’s error"

    def score(self, found: MapEstimate, comparison: Comparison) -> Scores:
        return score_maps(found, comparison)

    def judge(self, found: MapEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        return judge_maps(*scores.as_lists(), found.layer, int(found.certified.sum()), scores.details.get("false_certificates", 0))

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return beats_nulls(value, rivals)

    def proves(self, found: MapEstimate) -> bool:
        return bool(found.certified.any())

    def without_proof(self, found: MapEstimate, message: str) -> MapEstimate:
        return replace(found, certified=torch.zeros_like(found.certified), premises=(), message=message)

    def count_guesses(self, found: MapEstimate) -> int:
        return len(found.maps)

    def details(self, found: MapEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        layers = [
            {"name": one.name, "largest_batch": one.most_samples, "certified": one.certified, "reason": one.reason} for one in found.layers
        ]
        return {
            "certified": int(found.certified.sum()),
            "batch_size": found.batch_size,
            "layer": found.layer,
            "shape": list(found.maps.shape[1:]),
            "layers": layers,
        }

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        certified, false = details.get("certified"), details.get("false_certificates")
        if isinstance(details.get("layer"), str) and isinstance(details.get("shape"), list):
            facts.append(f"the input of {details['layer']}, {' × '.join(map(str, details['shape']))} numbers a sample")
        if isinstance(certified, int):
            facts.append(f"{certified} certified from the gradient alone" + (f", {false} of them wrongly" if false else ""))
        if details.get("batch_size") is not None:
            facts.append(f"batch size {details['batch_size']} read off the gradient")
        return facts

    def pictures(self, found: MapEstimate, comparison: Comparison, scores: Scores) -> list[dict[str, Any]]:
        assert comparison.exposure is not None
        return map_pictures(found.maps, true_maps(comparison.exposure, found.layer, comparison.truth.inputs), scores)


def judge_maps(found: Mapping[str, Values], nulls: Nulls, layer: str, certified: int, refuted: int) -> tuple[Verdict, str]:
    """Maps leaked where one is certified, or where the median error beats the median of every null."""
    errors = [number(value, math.inf) for value in found.get("map_error", ())]
    if refuted:
        return Verdict.NOT_SHOWN, f"{refuted} of {certified} certificates are refuted by the truth: do not trust this run, and report it"
    if not errors:
        unmeasured = "their error cannot be measured, since the client's own maps cannot be computed again"
        verdict = Verdict.LEAKED if certified else Verdict.NOT_SHOWN
        return verdict, f"the activation maps of {certified} samples certified from the gradient alone; {unmeasured}"
    middle = median(errors)
    if certified:
        counted = f"the activation maps of {certified} of {len(errors)} samples at {layer} certified from the gradient alone"
        return Verdict.LEAKED, f"{counted}; median relative error {middle:.2g}"
    null_medians = [median([number(value, math.inf) for value in column]) for column in columns_of(nulls, "map_error")]
    floor = min(null_medians, default=1.0)
    if null_medians and beats_nulls(middle, null_medians):
        return Verdict.LEAKED, f"median relative error of the maps {middle:.2g}, the best null has {floor:.2g}"
    return Verdict.NOT_SHOWN, f"median relative error of the maps {middle:.2g} against {floor:.2g} of the best null"


def score_maps(found: MapEstimate, comparison: Comparison) -> Scores:
    """Compare recovered maps with what the exposure's model computes from the private batch at the same layer."""
    exposure, foreign, auxiliary, truth = comparison.exposure, comparison.foreign, comparison.auxiliary, comparison.truth
    if exposure is None:
        raise ValueError("exposure: scoring maps needs the exposure they were recovered from, whose model gives the true ones")
    true = true_maps(exposure, found.layer, truth.inputs)  # the whole batch at once, as batch norm in train mode saw it
    if found.maps.shape[1:] != true.shape[1:]:
        raise ValueError(f"found.maps: expected (n, {', '.join(map(str, true.shape[1:]))}), got {tuple(found.maps.shape)}")
    public = None
    if auxiliary is not None:
        pieces = auxiliary.inputs.tensor_split(-(-len(auxiliary.inputs) // AUXILIARY_PIECE))  # of nearly equal size
        public = torch.cat([true_maps(exposure, found.layer, piece) for piece in pieces]).to(torch.float64)
    if foreign is not None and foreign.layer != found.layer:
        foreign = None  # maps of another layer compare with nothing here
    scores = score_samples(
        "maps",
        recovered=found.maps.detach().to(true.device, torch.float64),
        truth=true.to(torch.float64),
        auxiliary=public,
        foreign=None if foreign is None else foreign.maps.detach().to(true.device, torch.float64),
        blind=("zero", torch.zeros_like(true, dtype=torch.float64)),
        metrics=comparison.metrics,
    )
    assert scores.assignment is not None
    details: dict[str, Any] = {"recovered": len(found.maps)}
    if not any(defense.replaces for defense in exposure.public.defenses):  # else the truth is not what the client trained on
        details["false_certificates"] = int(false_certificates(found, true, scores.assignment).sum())
    return replace(scores, details=details)


def true_maps(exposure: Exposure, layer: str, inputs: Tensor) -> Tensor:
    """What the layer receives when the model sees `inputs`: (B, C, H, W)."""
    parameter = next(exposure.model.parameters())
    return input_of(exposure.model, layer, inputs.to(parameter.device, parameter.dtype))


def false_certificates(found: MapEstimate, true: Tensor, assignment: Tensor) -> Tensor:
    """Which recovered samples are certified and refuted by the truth: (n,) bool."""
    errors = torch.full((len(found.maps),), torch.inf, dtype=torch.float64)
    for sample, partner in enumerate(assignment.tolist()):
        if partner >= 0:
            difference = found.maps[partner].to(true) - true[sample]
            errors[partner] = float(difference.double().norm() / true[sample].double().norm())
    allowed = found.error_bars.cpu().double().clamp(max=LARGEST_CERTIFIED_ERROR)
    return found.certified.cpu() & ~(errors <= allowed)


def map_pictures(recovered: Tensor, true: Tensor, scores: Scores) -> list[dict[str, Any]]:
    """One row a sample: the channels with the largest true entries, true and recovered, on one scale."""
    assert scores.assignment is not None
    rows = []
    for sample, partner in enumerate(scores.assignment[:MOST_PICTURES].tolist()):
        channels = true[sample].flatten(1).amax(1).topk(min(SHOWN_CHANNELS, len(true[sample]))).indices
        brightest = true[sample][channels].amax((1, 2), keepdim=True).clamp(min=torch.finfo(true.dtype).tiny)
        wanted = true[sample][channels] / brightest
        got = recovered[partner].to(true)[channels] / brightest if partner >= 0 else None
        rows.append(
            {
                "truth": png(_tiles(wanted)),
                "recovered": None if got is None else png(_tiles(got)),
                "nulls": {},
                "map_error": float(scores["map_error"][sample]) if "map_error" in scores else None,
            }
        )
    return rows


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
