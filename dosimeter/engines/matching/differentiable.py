"""Whether a model's gradient can be differentiated again. This is tried before an attack relies on it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dosimeter.client.gradients import leaves
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.errors import first_line, is_out_of_memory
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.paths import Eager, Evaluation
from dosimeter.engines.matching.problem import Problem, in_double_precision
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers, forward


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Compute attention by plain matrix products: fused kernels have no second derivative, those of encoder layers not even a first."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def reason_against(problem: Problem, variables: Tensor) -> str:
    """Why the gradient of the matching objective would be wrong here, or nothing."""
    try:
        return _reason_in_custom_functions(problem, variables[:1]) or _reason_in_slope(problem, variables)
    except NotTwiceDifferentiable as missing:
        return f"the model's gradient cannot be differentiated once more: {missing}"


class NotTwiceDifferentiable(Exception):
    """The model has a gradient, and this gradient has none."""


def _evaluate(problem: Problem, objective: Objective, inputs: Tensor, logits: Tensor | None, terms: Terms) -> Evaluation:
    """Evaluate eagerly, (1, B, *shape). An error that the client's own training does not raise lies in the second derivative."""
    try:
        return Eager(objective)(inputs, logits, objective.names, terms)
    except (RuntimeError, NotImplementedError) as error:
        if is_out_of_memory(error) or not _trains(problem, inputs[0], logits):
            raise
        raise NotTwiceDifferentiable(first_line(error)) from error


def _trains(problem: Problem, inputs: Tensor, logits: Tensor | None) -> bool:
    """Whether the client's training runs on a guess, with first derivatives alone."""
    public, objective = problem.exposure.public, problem.objective
    targets = objective.targets if logits is None else objective.soft_targets(logits[0])
    assert targets is not None
    try:
        public.training(problem.exposure.model, inputs.detach().clone(), targets, public.loss)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _reason_in_slope(problem: Problem, variables: Tensor) -> str:
    """A model that rounds or detaches its inputs has a slope of exactly 0 everywhere, so that no step would ever be taken.

    The slope is tried at every start and at the start's mirror image in the data range, until one is not 0. One start alone does not
    tell: it may be the answer, or all units may be off there. A guess to which the model gives its label without any error has no
    slope either.
    """
    guess = problem.guess
    objective = problem.objective.under(dataclasses.replace(problem.recipe, distance=SquaredError(), priors=()))
    terms = Terms(matching=variables.new_ones(()), priors=variables.new_zeros(0))
    of_nothing, distances = objective.recipe.distance.scale(list(objective.target.values())), []
    for one in variables.split(1):
        inputs, logits = guess.unpack(one)
        for at in (inputs, guess.low + guess.high - inputs):
            evaluation = _evaluate(problem, objective, at, logits, terms)
            if bool(evaluation.inputs.any()) or not bool(torch.isfinite(evaluation.objective).all()):
                return ""
            distances.append(float(evaluation.distance[0]))
    if all(abs(distance - of_nothing) <= 1e-6 * of_nothing for distance in distances):
        return "the model gives every start its label without any error, so that its update is 0 and no step can be taken"
    reads_ids = any(isinstance(module, nn.Embedding | nn.EmbeddingBag) for module in problem.exposure.model.modules())
    tokens = "; the inputs are ids of an embedding, and the rows of its gradient that are not zero name them" if reads_ids else ""
    return (
        "the model passes no gradient to its inputs, as one that rounds or detaches them: no step can be taken, "
        f"whatever the update holds{tokens}"
    )


def _reason_in_custom_functions(problem: Problem, variables: Tensor) -> str:
    """Autograd silently skips a custom function that is differentiable only once.

    Where the model has custom functions, the objective's slope along its own gradient is compared with a difference quotient, in
    double precision.
    """
    custom = _custom_functions(problem.exposure, problem.guess.unpack(variables)[0][0])
    if not custom:
        return ""
    double = in_double_precision(problem)
    inputs, logits = double.guess.unpack(variables.double())
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(len(problem.recipe.priors)))

    def evaluate(at: Tensor) -> Evaluation:
        with torch.random.fork_rng(devices=[at.device] if at.is_cuda else []):
            torch.manual_seed(0)  # a model with dropout must draw the same mask each time
            return _evaluate(double, double.objective, at, logits, terms)

    slope = evaluate(inputs).inputs
    size = torch.linalg.vector_norm(slope)
    if not bool(torch.isfinite(size)):
        return ""
    direction = slope / size if float(size) > 0 else torch.ones_like(slope) / slope.numel() ** 0.5
    ahead, behind = (evaluate(inputs + sign * 1e-6 * direction).objective[0] for sign in (1, -1))
    quotient = float(ahead - behind) / 2e-6
    if abs(quotient - float(size)) <= 1e-3 * max(abs(quotient), float(size)) + 1e-9:
        return ""
    return f"the backward pass of {custom[0]} does not let itself be differentiated: the objective falls by {quotient:.3g}, not {size:.3g}"


def _custom_functions(exposure: Exposure, inputs: Tensor) -> list[str]:
    """The names of the Python-defined autograd functions that a forward pass leaves in the graph."""
    model = exposure.model
    with torch.enable_grad():
        output = forward(model, (leaves(model), copied_buffers(model)), inputs.detach())
    waiting, seen, names = [output.grad_fn], set(), []
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(node, torch.autograd.function.BackwardCFunction):
            names.append(type(node).__name__.removesuffix("Backward"))
        waiting.extend(parent for parent, _ in node.next_functions)
    return names
