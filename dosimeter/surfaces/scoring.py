"""Where the truth returns: every recovery is scored by its surface, beside its nulls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from dosimeter.client.checks import check_inputs, check_samples, check_tensor, check_tensors, output_shape
from dosimeter.interfaces import Exposure, Metric
from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.probing import as_taken
from dosimeter.precision import tf32
from dosimeter.surfaces.scores import Comparison, Scores
from dosimeter.surfaces.surface import surface_of
from dosimeter.types import Batch, NamedInputs, Normalization, Reconstruction


def score(
    found: Any,
    truth: Batch,
    *,
    normalization: Normalization | None = None,
    auxiliary: Batch | None = None,
    foreign: Any = None,
    refused: Mapping[str, str] | None = None,
    exposure: Exposure | None = None,
    classes: int | None = None,
    metrics: Sequence[str | Metric] | None = None,
) -> Scores:
    """Score an estimate of any surface against the private batch, by every metric of its surface or by `metrics`.

    A null is what the same score is worth without the gradient:

    - inputs, features: `mean` of the auxiliary data, and `nearest`, the auxiliary sample nearest to the truth. Without auxiliary data
      `gray`, the mid-gray image, or `zero`.
    - labels: `prior`, random labels of the auxiliary distribution (uniform without).
    - all: `foreign`, recovered from another gradient. `refused` says why a null could not be made; the scores' details keep it.
    - inputs: `found.nulls`, what a method's own prior draws.

    `normalization` overrides the one in `found`. `auxiliary` defaults to what `exposure` grants. Features need `exposure`, since its
    model makes the true ones. `classes` sets the length of count vectors where the estimate's is shorter.
    """
    check_samples(truth, "truth")
    if isinstance(truth.inputs, NamedInputs) and truth.inputs.are_numbers:
        truth = Batch(truth.inputs.joined(), truth.targets)
    if auxiliary is None and exposure is not None:
        auxiliary = exposure.auxiliary
    if auxiliary is not None:
        check_tensors(auxiliary, "auxiliary")
        if len(auxiliary.inputs) == 0:
            raise ValueError("auxiliary: expected at least one sample, or None")
    surface = surface_of(found)
    if isinstance(found, Reconstruction):
        check_tensor(found.inputs, "found.inputs")
    if foreign is not None and not isinstance(foreign, surface.estimate):
        raise TypeError(f"foreign: expected a {type(found).__name__} like what is scored, got {type(foreign).__name__}")
    comparison = Comparison(
        truth=truth,
        auxiliary=auxiliary,
        foreign=foreign,
        refused=refused or {},
        exposure=exposure,
        normalization=normalization,
        classes=classes,
        metrics=metrics,
    )
    if exposure is None:
        return score_against(found, comparison)
    with nothing_kept(exposure.model):  # the truth goes through the model
        for path, batch in (("truth", truth), ("auxiliary", auxiliary)):
            if batch is not None:
                _check_taken(exposure, batch, path)
        return score_against(found, comparison)


def _check_taken(exposure: Exposure, batch: Batch, path: str) -> None:
    """Refuse samples that the exposure's model does not take."""
    check_inputs(batch.inputs, f"{path}.inputs")
    try:
        output_shape(exposure.model, as_taken(exposure.model, batch.inputs[[0, 0]]))
    except ValueError as error:
        raise ValueError(f"{path}.inputs: {error}") from error


def score_against(found: Any, comparison: Comparison) -> Scores:
    """The scores of an estimate by its surface; they name every null that could not be made."""
    with tf32(allowed=False):
        scores = surface_of(found).score(found, comparison)
    if not comparison.refused:
        return scores
    said = tuple(f"the null {name!r} could not be made: {why}" for name, why in comparison.refused.items())
    details = scores.details | {"refused_nulls": dict(comparison.refused)}
    return replace(scores, details=details, warnings=(*scores.warnings, *said))
