"""A decoder's latent space, and two ways to search it for the images whose gradient is the client's."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import decode
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.matching.paths import Evaluation
from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.terms import evaluate_final
from dosimeter.normalization import from_pixels
from dosimeter.progress import advance

MOST = 1024  # auxiliary images that the axes are taken from
RANGE = 4.0  # standard deviations that a coordinate may lie from the mean


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Coordinates along the principal axes of the auxiliary features, in standard deviations; a decoder draws them."""

    target: Target
    decoder: Decoder
    mean: Tensor  # (H,)
    axes: Tensor  # (k, H), as long as the features spread along them

    @classmethod
    def of(cls, target: Target, decoder: Decoder, pixels: Tensor, dimensions: int, rng: Generator) -> Latent:
        chosen = torch.randperm(len(pixels), generator=rng, device=rng.device)[:MOST].to(pixels.device)
        features = target.features_in_batches(target.images(pixels[chosen]), min(32, len(chosen)))
        features = features.to(next(decoder.parameters()))
        centred = features - features.mean(0)
        values, vectors = torch.linalg.eigh((centred @ centred.T).double())  # (n,), (n, n): n is far below H
        kept = min(dimensions, len(values) - 1)
        axes = vectors[:, -kept:].flip(1).T.to(centred) @ centred / math.sqrt(len(centred))  # (k, H)
        return cls(target=target, decoder=decoder, mean=features.mean(0), axes=axes)

    def draw(self, coordinates: Tensor) -> Tensor:
        """(n, k) -> inputs in the model's scale (n, *image)."""
        return from_pixels(decode(self.decoder, self.mean + coordinates @ self.axes), self.target.normalization)


def descend(latent: Latent, problem: Problem, start: Tensor, *, steps: int, rate: float, penalty: float) -> tuple[Tensor, list[float]]:
    """Adam on the coordinates (B, k): the matching engine gives the slope at the images, the decoder hands it on."""
    coordinates = start.clone().requires_grad_()
    optimizer = torch.optim.Adam([coordinates], lr=rate)
    best, lowest, reached = start.clone(), math.inf, []
    for step in range(steps):
        inputs = latent.draw(coordinates)
        evaluation = evaluate(problem, inputs.detach()[None])
        objective = float(evaluation.objective[0]) + penalty * float(coordinates.detach().square().mean())
        reached.append(objective)
        if objective < lowest:
            best, lowest = coordinates.detach().clone(), objective
        (slope,) = torch.autograd.grad(inputs, [coordinates], evaluation.inputs[0].to(inputs))
        coordinates.grad = slope.nan_to_num(0.0) + 2 * penalty * coordinates.detach() / coordinates.numel()
        optimizer.step()
        with torch.no_grad():
            coordinates.clamp_(-RANGE, RANGE)
        advance(step + 1, steps, f"objective {lowest:.3g}")
    return best, reached


def specialise(latent: Latent, problem: Problem, coordinates: Tensor, *, steps: int, rate: float) -> tuple[Tensor, list[float]]:
    """Adam on the weights of a decoder for each sample, with the coordinates (B, k) held: the inputs with the lowest distance (B, *shape).

    Jeon et al., NeurIPS 2021, second stage. The images leave what the decoder could draw before.
    """
    decoders = [copy.deepcopy(latent.decoder).requires_grad_() for _ in coordinates]
    optimizer = torch.optim.Adam([parameter for decoder in decoders for parameter in decoder.parameters()], lr=rate)
    features = (latent.mean + coordinates @ latent.axes).detach()
    best, lowest, reached = latent.draw(coordinates).detach(), math.inf, []
    for step in range(steps + 1):
        with torch.enable_grad():
            drawn = torch.cat([decode(decoder, feature[None]) for decoder, feature in zip(decoders, features, strict=True)])
            inputs = from_pixels(drawn, latent.target.normalization)
        evaluation = evaluate(problem, inputs.detach()[None])
        distance = float(evaluation.distance[0])
        reached.append(distance)
        if distance < lowest:
            best, lowest = inputs.detach().clone(), distance
        if step < steps:
            optimizer.zero_grad()
            inputs.backward(evaluation.inputs[0].to(inputs).nan_to_num(0.0))
            optimizer.step()
            advance(step + 1, steps, f"distance {lowest:.3g}")
    return best, reached


def evolve(
    latent: Latent, problem: Problem, start: Tensor, rng: Generator, *, steps: int, population: int, penalty: float
) -> tuple[Tensor, list[float]]:
    """Separable covariance-matrix adaptation (Ros and Hansen, PPSN 2008): only the objective is asked for, never a slope."""
    size = start.numel()
    parents = max(1, population // 2)
    weights = math.log(parents + 0.5) - torch.arange(1, parents + 1, dtype=torch.float64).log()
    weights = (weights / weights.sum()).to(start)
    effective = float(1 / weights.square().sum())
    step_rate, damping = (effective + 2) / (size + effective + 3), 1 + (effective + 2) / (size + effective + 3)
    path_rate = 4 / (size + 4)
    rank_one = 2 / ((size + 1.3) ** 2 + effective) * (size + 2) / 3
    rank_many = min(1 - rank_one, 2 * (effective - 2 + 1 / effective) / ((size + 2) ** 2 + effective) * (size + 2) / 3)
    rank_many = max(rank_many, 0.0)
    expected = math.sqrt(size) * (1 - 1 / (4 * size) + 1 / (21 * size**2))
    mean, spread, variances = start.flatten().clone(), 0.5, torch.ones(size).to(start)
    step_path, path = torch.zeros_like(mean), torch.zeros_like(mean)
    best, lowest, reached = start.clone(), math.inf, []
    for step in range(steps):
        noise = torch.randn(population, size, generator=rng, device=rng.device).to(start)
        moves = noise * variances.sqrt()  # (population, B k)
        candidates = (mean + spread * moves).clamp(-RANGE, RANGE)
        with torch.no_grad():
            inputs = torch.stack([latent.draw(candidate.view_as(start)) for candidate in candidates])
        values = evaluate(problem, inputs).objective + penalty * candidates.square().mean(1)
        order = values.nan_to_num(math.inf).argsort()
        reached.append(float(values[order[0]]))
        if reached[-1] < lowest:
            best, lowest = candidates[order[0]].view_as(start).clone(), reached[-1]
        move = weights @ moves[order[:parents]]
        mean = mean + spread * move
        step_path = (1 - step_rate) * step_path + math.sqrt(step_rate * (2 - step_rate) * effective) * move / variances.sqrt()
        path = (1 - path_rate) * path + math.sqrt(path_rate * (2 - path_rate) * effective) * move
        chosen = weights @ moves[order[:parents]].square()
        variances = (1 - rank_one - rank_many) * variances + rank_one * path.square() + rank_many * chosen
        spread *= math.exp(min(1.0, step_rate / damping * (float(step_path.norm()) / expected - 1)))
        advance(step + 1, steps, f"objective {lowest:.3g}")
    return best, reached


def evaluate(problem: Problem, inputs: Tensor) -> Evaluation:
    """The matching objective of (R, B, *shape) inputs, and its slope."""
    with twice_differentiable():
        return evaluate_final(problem, inputs)
