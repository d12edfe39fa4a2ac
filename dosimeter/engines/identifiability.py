"""What a gradient can determine: its rank, the bound on the rank, and the noise floor, layer by layer."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dosimeter.client.checks import require_exposure
from dosimeter.engines.subspace.spectrum import Spectrum, factor, noise_edge, rounding_unit
from dosimeter.engines.weight_rounding import rounding_of_weights
from dosimeter.interfaces import Exposure, Public
from dosimeter.network.head import find_head, parameter_name
from dosimeter.randomness import generator
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class LayerIdentifiability:
    """The number of samples that the gradient of one layer can separate."""

    name: str
    kind: str  # head, linear or convolution
    shape: tuple[int, int]  # of the gradient as a matrix
    bound: int  # the largest rank that the layer's shape allows
    rank: int  # directions above the noise
    smallest_kept: float  # singular value, over the largest
    largest_dropped: float  # singular value, over the largest
    floor: float  # the largest singular value of the noise alone, over the largest
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Identifiability:
    """The layers that the client sent, the head last, and what they say about the batch."""

    layers: tuple[LayerIdentifiability, ...]
    batch_size: int | None  # declared, else the head's rank where that is below its bound
    separable: int | None  # samples that the head's gradient can separate; None without a head gradient
    sentence: str


def identifiability(exposure: Exposure, *, inner: bool = True) -> Identifiability:
    """What the gradient of each layer can determine: its rank, the bound on the rank, and the gap above the noise.

    Without `inner`, the head alone is looked at, which says what the whole says of the batch.
    """
    require_exposure(exposure)
    try:
        head = find_head(exposure)
        owner = parameter_name(exposure.model, head.name, "weight").rpartition(".")[0]  # of a wrapped layer, the layer inside
        head_name = owner if head.weight_gradient is not None else None
    except Refused:
        head_name = None
    size = exposure.public.batch_size
    layers = []
    for name, module in exposure.model.named_modules():
        change = exposure.update.get(_weight_of(name))
        if change is None or not isinstance(module, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)):
            continue
        if inner or name == head_name:
            layers.append(_layer(name, module, change, exposure.public, is_head=name == head_name))
    layers.sort(key=lambda layer: layer.kind == "head")
    if not layers or layers[-1].kind != "head":
        return Identifiability(layers=tuple(layers), batch_size=size, separable=None, sentence="the client sent no head gradient")
    last = layers[-1]
    if size is None and last.rank > 0 and any(defense.distorts() for defense in exposure.public.defenses):
        directions = "1 direction" if last.rank == 1 else f"{last.rank} directions"
        behind = (
            f"behind the defenses in force the head's gradient shows {directions} above its noise; that need not be the number of samples"
        )
        last = replace(last, sentence=behind)
        return Identifiability(layers=(*layers[:-1], last), batch_size=None, separable=last.rank, sentence=behind)
    known = size if size is not None else (last.rank if last.rank < last.bound else None)
    return Identifiability(layers=tuple(layers), batch_size=known, separable=last.rank, sentence=last.sentence)


def counting_sentences(exposure: Exposure) -> list[str]:
    """How many numbers the update has, how many unknown ones the inputs, and which layer alone has enough, as sentences.

    Fewer equations than unknowns leave some inputs that no attacker without a prior tells apart. Enough of them promise nothing.
    """
    size, shape = exposure.public.batch_size, exposure.public.input_shape
    if size is None or exposure.public.blank is not None:
        return []
    unknowns = size * math.prod(shape)
    numbers = {name: change.numel() for name, change in exposure.update.items()}
    sent = sum(numbers.values())
    verdict = (
        "enough for every unknown, which promises nothing by itself"
        if sent >= unknowns
        else f"too few by {unknowns - sent:,}: without a prior, some inputs cannot be told apart"
    )
    said = [f"the update has {sent:,} numbers for {unknowns:,} unknown ones of {size} inputs: {verdict}"]
    largest = max(numbers, key=lambda name: numbers[name])
    alone = [name for name, count in numbers.items() if count >= unknowns]
    if alone:
        said.append(
            f"{len(alone)} of {len(numbers)} parameters have enough numbers alone; the largest, {largest}, has {numbers[largest]:,}"
        )
    return said


def _weight_of(name: str) -> str:
    return f"{name}.weight" if name else "weight"


def _layer(name: str, module: nn.Module, change: Tensor, public: Public, *, is_head: bool) -> LayerIdentifiability:
    size = public.batch_size
    other = rounding_of_weights(module.weight, change, public).flatten(1)  # pyright: ignore[reportArgumentType]
    matrix = change.detach().to(torch.float64).flatten(1)  # (out, in × window)
    rows, columns = matrix.shape
    kind = "head" if is_head else "linear" if isinstance(module, nn.Linear) else "convolution"
    bound = min(rows - 1, columns) if is_head else min(rows, columns)
    rng = generator(0, "identifiability", matrix.device)
    if is_head:
        spectrum = factor(matrix, rounding_unit(change), rng, at_most=size, other=other)
        rank, kept, dropped, floor = _summarise(spectrum)
    else:
        rank, kept, dropped, floor = _rank_above_rounding(matrix, rounding_unit(change), other)
    words = _head_sentence(rank, bound, rows, columns, size) if is_head else _inner_sentence(kind, rank, bound, size)
    return LayerIdentifiability(
        name=name,
        kind=kind,
        shape=(rows, columns),
        bound=bound,
        rank=rank,
        smallest_kept=kept,
        largest_dropped=dropped,
        floor=floor,
        sentence=words,
    )


def _summarise(spectrum: Spectrum) -> tuple[int, float, float, float]:
    if spectrum.rank == 0:
        return 0, 0.0, 1.0, 1.0
    largest = float(spectrum.values[0])
    return spectrum.rank, float(spectrum.values[-1]) / largest, spectrum.below / largest, spectrum.edge / largest


def _rank_above_rounding(matrix: Tensor, unit: float, other: Tensor) -> tuple[int, float, float, float]:
    """The rank above rounding, for layers whose rows need not sum to zero."""
    values = torch.linalg.svdvals(matrix)
    if len(values) == 0 or float(values[0]) == 0:
        return 0, 0.0, 0.0, 0.0
    rounding = math.hypot(unit * float(matrix.square().mean().sqrt()), float(other.square().mean().sqrt()))
    floor = noise_edge(rounding, *matrix.shape)
    rank = int((values > 8 * floor).sum())
    largest = float(values[0])
    return rank, float(values[rank - 1]) / largest, float(values[rank]) / largest if rank < len(values) else 0.0, floor / largest


def _head_sentence(rank: int, bound: int, classes: int, features: int, size: int | None) -> str:
    of = f"these {size} samples" if size is not None else "the batch's samples"
    if rank == 0:
        return "no direction of the head's gradient stands above its noise: it separates no sample"
    if size is not None and size > bound:
        limit = f"{classes} classes" if classes - 1 <= features else f"{features} features"
        return f"at most {bound} of {of} can be separated by this head, which has {limit}"
    if size is not None and rank < size:
        return f"at most {rank} of {of} can be separated by this head: the others repeat them or lie below the noise"
    if rank == bound:
        return f"the head's gradient has full rank, {rank}: the batch has at least that many samples"
    if rank == 1:
        return "the head's gradient holds 1 sample"
    alone = "each on its own" if 2 * rank <= classes - 1 else "all of them together"
    return f"the head's gradient holds {rank} samples, which are determined {alone}"


def _inner_sentence(kind: str, rank: int, bound: int, size: int | None) -> str:
    if kind == "convolution":
        return f"rank {rank} of {bound}; a convolution adds one direction a sample and position"
    if size is not None and rank >= size:
        return f"rank {rank}: every sample's input lies in the span of this gradient's rows"
    return f"rank {rank} of {bound}" + (f": at most {rank} inputs can be told apart" if rank < bound else "")
