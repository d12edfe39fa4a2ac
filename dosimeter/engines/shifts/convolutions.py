"""The layers of an exposure whose gradients can show their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from dosimeter.interfaces import Exposure
from dosimeter.network.layer_shapes import LayerShape, as_kernel, find_shapes


@dataclass(frozen=True, kw_only=True)
class ConvolutionLayer(LayerShape):
    """A layer with its gradient as it was sent."""

    gradient: Tensor  # (out, in, k, k)


def find_convolutions(exposure: Exposure) -> list[ConvolutionLayer]:
    """Every layer whose weight gradient was sent, in the order in which the model runs them."""
    found = []
    for shape in find_shapes(exposure.model, exposure.public.input_shape, exposure.public.normalization):
        gradient = exposure.update.get(f"{shape.name}.weight" if shape.name else "weight")
        if gradient is not None:
            found.append(ConvolutionLayer(**vars(shape), gradient=as_kernel(gradient)))
    return found
