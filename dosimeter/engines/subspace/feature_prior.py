"""What a server expects of the features before it sees a gradient: their mean and spread over public or synthetic inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head
from dosimeter.network.probing import input_of
from dosimeter.network.random_texts import random_texts
from dosimeter.normalization import from_pixels
from dosimeter.randomness import generator

SYNTHETIC_INPUTS = 64
SHARE_LEEWAY = 2.0  # factor by which private inputs may leave the range of shares of the inputs tried here
PIXEL_CONTRAST = 0.25  # standard deviation of the synthetic pixels


@dataclass(frozen=True, kw_only=True)
class FeaturePrior:
    """The distribution of features before a gradient is seen. Behind a ReLU, gain and spread are those of the value before it."""

    mean: Tensor  # (H,)
    size: Tensor  # (H,) root mean square, averaged with its mean over H so that no feature counts as impossible
    gain: Tensor  # () multiple of the mean that a sample has
    spread: Tensor  # () variance about gain times mean, in units of the size
    least: float = -math.inf  # the least multiple of the mean that is expected of a feature
    most: float = math.inf  # the largest

    def share(self, features: Tensor) -> Tensor:
        """The multiple of the mean in each feature, by least squares: (n, H) -> (n,)."""
        return features @ self.mean / self.mean.square().sum().clamp_min(torch.finfo(self.mean.dtype).tiny)


def find_feature_prior(exposure: Exposure, head: Head) -> FeaturePrior | None:
    """The prior from the features of auxiliary samples if the server has some, else of synthetic inputs, in the client's mode.

    None if nothing is known: without auxiliary samples, inputs that are no images and go straight into the head may be anything.
    """
    granted = exposure.auxiliary is not None
    inputs = exposure.auxiliary.inputs[: 4 * SYNTHETIC_INPUTS] if exposure.auxiliary is not None else _synthetic_inputs(exposure)
    features = torch.nan_to_num(input_of(exposure.model, head.name, inputs).to(torch.float64))
    if not granted and len(inputs.shape) == 2 and features.shape == inputs.shape and torch.equal(features, inputs.double()):
        return None
    found = fit_feature_prior(features, head.non_negative)
    least, most = found.share(features).aminmax()
    return replace(
        found,
        least=float(torch.minimum(least / SHARE_LEEWAY, least * SHARE_LEEWAY)),
        most=float(torch.maximum(most / SHARE_LEEWAY, most * SHARE_LEEWAY)),
    )


def fit_feature_prior(features: Tensor, non_negative: bool) -> FeaturePrior:
    """The prior that fits features (n, H).

    Non-negative features of which a share ρ is zero are modelled as the positive part of a Gaussian N(κτ, τ²) with Φ(−κ) = ρ. Their
    mean is τ(κΦ(κ) + φ(κ)).
    """
    mean, size = features.mean(0), features.square().mean(0).sqrt()
    one = torch.ones_like(size[0])
    if not float(size.mean()) > 0:
        return FeaturePrior(mean=torch.zeros_like(size), size=torch.ones_like(size), gain=one, spread=one)
    size = (size + size.mean()) / 2
    zeros = (features == 0).to(features).mean()
    if not non_negative or float(zeros) < 0.01:
        return FeaturePrior(mean=mean, size=size, gain=one, spread=((features - mean) / size).square().mean().clamp_min(1e-4))
    middle = -torch.special.ndtri(zeros.clamp_max(0.99))  # κ
    height = middle * torch.special.ndtr(middle) + torch.exp(-middle.square() / 2) / math.sqrt(2 * math.pi)
    deviation = (mean / size).mean() / height  # τ
    return FeaturePrior(mean=mean, size=size, gain=middle * deviation / (mean / size).mean(), spread=deviation.square())


def _synthetic_inputs(exposure: Exposure) -> Any:
    """Images with the amplitude spectrum of natural ones, 1/frequency; white noise for other shapes, random tokens for texts."""
    parameter = next(exposure.model.parameters())
    if exposure.public.blank is not None:
        return random_texts(exposure.model, exposure.public.blank, SYNTHETIC_INPUTS, generator(0, "typical inputs"))
    noise = torch.randn(SYNTHETIC_INPUTS, *exposure.public.input_shape, generator=generator(0, "typical inputs"))
    if noise.ndim == 4:
        height, width = noise.shape[-2:]
        frequency = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None])
        noise = torch.fft.irfft2(torch.fft.rfft2(noise) / frequency.clamp_min(1 / max(height, width)), s=(height, width))
        noise = from_pixels((0.5 + PIXEL_CONTRAST * noise / noise.std()).clamp(0, 1), exposure.public.normalization)
    return noise.to(device=parameter.device, dtype=parameter.dtype)
