"""The settings of every evaluation of an attack: its own random numbers, a precision, and layers with two derivatives."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Generator

from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.matching.problem import Problem
from dosimeter.engines.matching.substitutes import Substitutes
from dosimeter.network.probing import output_of
from dosimeter.precision import tf32


@contextmanager
def surroundings(problem: Problem, rng: Generator) -> Iterator[None]:
    with _own_random_numbers(rng, problem.device), tf32(problem.recipe.precision != "fp32"), twice_differentiable(), _substitutes(problem):
        yield


def _substitutes(problem: Problem) -> Substitutes | nullcontext[None]:
    """Other forms of functions without a second derivative, where a pass of the model meets one; else nothing, which costs nothing."""
    seen = Substitutes()
    try:
        with seen:
            output_of(problem.exposure.model, problem.guess.low.expand(problem.guess.shape))
    except Exception:  # a model may fail in any way; the attack's own trial says how
        return nullcontext()
    return Substitutes() if seen.met else nullcontext()


@contextmanager
def _own_random_numbers(rng: Generator, device: torch.device) -> Iterator[None]:
    """Seed the global generator, from which dropout in the model draws, and restore the caller's state afterwards."""
    seed = int(torch.randint(2**62, (), generator=rng, device=rng.device))
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(seed)
        yield
