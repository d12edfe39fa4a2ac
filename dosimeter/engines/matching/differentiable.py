"""Whether a model's gradient can be differentiated again, found out before it misleads an attack, and what is done so that it can."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from dosimeter.client.training import leaves
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.guess import Guess
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.paths import Eager, Evaluation
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.interfaces import Exposure
from dosimeter.network.probing import copied_buffers


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by plain matrix products: its fused kernels have no second derivative, those of whole encoder layers not even a first."""
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


def in_one_precision(exposure: Exposure) -> Exposure:
    """The exposure with its update in the model's precision, and half precision as single: squares of gradients leave its range."""
    model, half = exposure.model, (torch.float16, torch.bfloat16)
    if any(parameter.dtype in half for parameter in model.parameters()):
        model = copy.deepcopy(model).float()
    dtypes = {name: parameter.dtype for name, parameter in model.named_parameters()}
    if model is exposure.model and all(change.dtype == dtypes[name] for name, change in exposure.update.items()):
        return exposure
    return dataclasses.replace(exposure, model=model, update={name: change.to(dtypes[name]) for name, change in exposure.update.items()})


def reason_against(exposure: Exposure, recipe: Recipe, guess: Guess, variables: Tensor) -> str:
    """Why the gradient of the matching objective would be wrong here, or nothing."""
    return _reason_in_custom_functions(exposure, recipe, guess, variables[:1]) or _reason_in_slope(exposure, recipe, guess, variables)


def _reason_in_slope(exposure: Exposure, recipe: Recipe, guess: Guess, variables: Tensor) -> str:
    """A model that rounds or detaches its inputs has a slope of exactly 0 at all of them: no step would ever be taken.

    Tried at every start and at its mirror image in the data range, until one has a slope: a start may be the answer, or hit upon units
    that are all off. Nor has a guess a slope that the model gives its label without any error.
    """
    objective = Objective(exposure, dataclasses.replace(recipe, distance=SquaredError(), priors=()), guess.targets)
    terms = Terms(matching=variables.new_ones(()), priors=variables.new_zeros(0))
    of_nothing, distances = objective.recipe.distance.scale(list(objective.target.values())), []
    for one in variables.split(1):
        inputs, logits = guess.unpack(one)
        for at in (inputs, guess.low + guess.high - inputs):
            evaluation = Eager(objective)(at, logits, objective.names, terms)
            if bool(evaluation.inputs.any()) or not bool(torch.isfinite(evaluation.objective).all()):
                return ""
            distances.append(float(evaluation.distance[0]))
    if all(abs(distance - of_nothing) <= 1e-6 * of_nothing for distance in distances):
        return "the model gives every start its label without any error, so that its update is 0 and no step can be taken"
    return (
        "the model passes no gradient to its inputs, as one that rounds or detaches them: no step can be taken, whatever the update holds"
    )


def _reason_in_custom_functions(exposure: Exposure, recipe: Recipe, guess: Guess, variables: Tensor) -> str:
    """Autograd skips without a word a custom function that is differentiable only once.

    So where the model has custom functions, the objective's slope along its own gradient is compared with a difference quotient, in
    double precision.
    """
    custom = _custom_functions(exposure, guess.unpack(variables)[0][0])
    if not custom:
        return ""
    objective = in_double_precision(exposure, recipe, guess)
    inputs, logits = guess.unpack(variables.double())
    terms = Terms(matching=inputs.new_ones(()), priors=inputs.new_zeros(len(recipe.priors)))

    def evaluate(at: Tensor) -> Evaluation:
        with torch.random.fork_rng(devices=[at.device] if at.is_cuda else []):
            torch.manual_seed(0)  # a model with dropout must draw the same mask each time
            return Eager(objective)(at, logits, objective.names, terms)

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


def in_double_precision(exposure: Exposure, recipe: Recipe, guess: Guess) -> Objective:
    """The same objective on a float64 copy of the model and the update."""
    model = copy.deepcopy(exposure.model).double()
    update = {name: change.double() for name, change in exposure.update.items()}
    targets = guess.targets if guess.targets is None or not guess.targets.is_floating_point() else guess.targets.double()
    return Objective(dataclasses.replace(exposure, model=model, update=update), dataclasses.replace(recipe, precision="fp32"), targets)


def _custom_functions(exposure: Exposure, inputs: Tensor) -> list[str]:
    """The names of the Python-defined autograd functions that a forward pass leaves in the graph."""
    model = exposure.model
    with torch.enable_grad():
        output = functional_call(model, (leaves(model), copied_buffers(model)), (inputs.detach().clone(),))
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
