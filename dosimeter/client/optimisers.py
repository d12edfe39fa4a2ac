"""A client's optimiser: any of `torch.optim` by name, and the steps that a server can replay on guesses.

The client steps with torch.optim itself. The rules here are the same steps without writing to anything, so that autograd differentiates
through them. They follow the algorithms in the documentation of `torch.optim`, with its names of arguments.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from dosimeter.options import OptionError
from dosimeter.registry import suggestion
from dosimeter.types import Refused

State = Mapping[str, Any]
Step = Callable[[Any, Any, State], tuple[Any, State]]  # weight, gradient, state -> the next weight and state
NOT_REPLAYED = ("maximize", "amsgrad", "centered", "decoupled_weight_decay")  # arguments without a rule here
SAME_STEPS = ("foreach", "fused", "capturable", "differentiable")  # arguments that change how a step is computed, not what
FIRST_ORDER_ONLY = ("lbfgs", "sparseadam")  # of torch.optim's: the one wants a closure, the other sparse gradients


@cache
def optimiser_named(name: str, path: str = "optimizer") -> type[torch.optim.Optimizer]:
    """The optimiser of torch.optim with this name, in any case of its letters."""
    known = {key.lower(): value for key, value in vars(torch.optim).items() if _is_optimiser(value)}
    if name.lower() not in known:
        raise OptionError(path, f"torch.optim has no optimiser {name!r}; {suggestion(name.lower(), sorted(known), 'there are')}")
    return known[name.lower()]


def check_arguments(name: str, arguments: Mapping[str, Any]) -> None:
    """Refuse arguments that the optimiser does not take, in its own words."""
    kind = optimiser_named(name)
    if kind is torch.optim.SGD and set(arguments) <= {"momentum", "weight_decay"}:
        return  # checked with their types; to build an optimiser imports for a second
    known = [argument for argument in inspect.signature(kind).parameters if argument not in ("params", "lr")]
    for argument in arguments:
        if argument not in known:
            raise OptionError(
                f"optimizer_options.{argument}", f"{kind.__name__} takes no such argument; {suggestion(argument, known, 'it takes')}"
            )
    try:
        build(name, [torch.zeros(2, 2, requires_grad=True)], 0.01, arguments)
    except (ValueError, TypeError, RuntimeError) as error:
        raise OptionError("optimizer_options", f"{kind.__name__} refuses them: {str(error).strip()}") from None


def build(name: str, parameters: list[Tensor], learning_rate: float, arguments: Mapping[str, Any]) -> torch.optim.Optimizer:
    return optimiser_named(name)(parameters, lr=learning_rate, **arguments)  # pyright: ignore[reportCallIssue]


def replayed_step(name: str, learning_rate: float, arguments: Mapping[str, Any]) -> Step:
    """One step of the optimiser as a function that autograd differentiates; refused where there is no rule."""
    kind = optimiser_named(name)
    rule = RULES.get(kind.__name__)
    if rule is None:
        raise Refused(f"training.optimizer: the steps of {kind.__name__} cannot be replayed here; those of {', '.join(RULES)} can")
    given = {key: value for key, value in arguments.items() if key not in SAME_STEPS}
    if odd := [key for key in NOT_REPLAYED if given.pop(key, False)]:
        raise Refused(f"training.optimizer_options: the steps of {kind.__name__} with {odd[0]} cannot be replayed here")
    return partial(rule, rate=learning_rate, **given)


def weight_decay_of(name: str, arguments: Mapping[str, Any]) -> float:
    """The weight decay that the optimiser has with these arguments; 0 where it has none."""
    default = inspect.signature(optimiser_named(name)).parameters.get("weight_decay")
    return float(arguments.get("weight_decay", 0.0 if default is None else default.default))


def sums_gradients(name: str) -> bool:
    """Whether the weights move by a weighted sum of gradients, as those of SGD do. Other optimisers divide by the gradients' own sizes."""
    return optimiser_named(name) is torch.optim.SGD


def linear_response(step: Step, steps: int, pull: float) -> tuple[float, float]:
    """Of optimisers that sum gradients: the weight 1 after steps without a gradient, and the weight 0 after steps of gradient 1.

    `pull` is FedProx's μ, which pulls the weight towards its first value.
    """
    kept, moved = 1.0, 0.0  # the rule of SGD takes plain numbers too
    state_kept: State = {}
    state_moved: State = {}
    for _ in range(steps):
        kept, state_kept = step(kept, pull * (kept - 1), state_kept)
        moved, state_moved = step(moved, 1 + pull * moved, state_moved)
    return kept, moved


def farthest(name: str, arguments: Mapping[str, Any], steps: int) -> float:
    """How far so many steps can move a weight, in learning rates, whatever the gradients are; ∞ where nothing bounds it.

    A step of Adam at time t divides Σ w_i g_i by √(Σ u_i g_i²), where w and u are the weights of its two means. By the inequality of
    Cauchy and Schwarz the quotient is at most √(Σ w_i² / u_i). A step of RMSprop is at most 1 / √(1 − α), one of Adagrad at most 1.
    """
    kind, known = optimiser_named(name), {"betas": (0.9, 0.999), "alpha": 0.99, "momentum": 0.0, "centered": False, **arguments}
    times = torch.arange(1, steps + 1, dtype=torch.float64)
    if kind in (torch.optim.Adam, torch.optim.AdamW):
        first, second = (torch.tensor(float(beta), dtype=torch.float64) for beta in known["betas"])
        ratio = first.square() / second  # w_i² / u_i grows by it with each step back
        back = times if float(ratio) == 1 else (1 - ratio**times) / (1 - ratio)
        scale = (1 - first) ** 2 / (1 - first**times) ** 2 * (1 - second**times) / (1 - second)
        return float(torch.nan_to_num((scale * back).sqrt(), nan=math.inf).sum())
    if kind is torch.optim.RMSprop and not known["centered"] and known["alpha"] < 1:
        momentum = float(known["momentum"])
        return float((1 - momentum**times).sum()) / (1 - momentum) / math.sqrt(1 - known["alpha"]) if momentum < 1 else math.inf
    return float(steps) if kind is torch.optim.Adagrad else math.inf


def _sgd(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    *,
    rate: float,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
) -> tuple[Tensor, State]:
    gradient = gradient + weight_decay * weight if weight_decay else gradient
    if momentum:
        velocity = momentum * state["velocity"] + (1 - dampening) * gradient if state else gradient
        state = {"velocity": velocity}
        gradient = gradient + momentum * velocity if nesterov else velocity
    return weight - rate * gradient, state


def _adam(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    *,
    rate: float,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
) -> tuple[Tensor, State]:
    gradient = gradient + weight_decay * weight if weight_decay else gradient
    count, (first, second) = state.get("count", 0) + 1, betas
    mean = first * state.get("mean", 0.0) + (1 - first) * gradient
    square = second * state.get("square", 0.0) + (1 - second) * gradient.square()
    size = _root(square) / (1 - second**count) ** 0.5 + eps
    return weight - rate / (1 - first**count) * mean / size, {"count": count, "mean": mean, "square": square}


def _adamw(
    weight: Tensor, gradient: Tensor, state: State, *, rate: float, weight_decay: float = 1e-2, **options: Any
) -> tuple[Tensor, State]:
    return _adam(weight * (1 - rate * weight_decay), gradient, state, rate=rate, **options)


def _rmsprop(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    *,
    rate: float,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
) -> tuple[Tensor, State]:
    gradient = gradient + weight_decay * weight if weight_decay else gradient
    square = alpha * state.get("square", 0.0) + (1 - alpha) * gradient.square()
    step = gradient / (_root(square) + eps)
    velocity = momentum * state.get("velocity", 0.0) + step if momentum else step
    return weight - rate * velocity, {"square": square, "velocity": velocity}


def _adagrad(
    weight: Tensor,
    gradient: Tensor,
    state: State,
    *,
    rate: float,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
) -> tuple[Tensor, State]:
    gradient = gradient + weight_decay * weight if weight_decay else gradient
    count = state.get("count", 0)
    total = state.get("total", initial_accumulator_value) + gradient.square()
    return weight - rate / (1 + count * lr_decay) * gradient / (_root(total) + eps), {"count": count + 1, "total": total}


RULES: dict[str, Callable[..., tuple[Tensor, State]]] = {
    "SGD": _sgd,
    "Adam": _adam,
    "AdamW": _adamw,
    "RMSprop": _rmsprop,
    "Adagrad": _adagrad,
}


def _root(square: Tensor) -> Tensor:
    """√square with slope 0 at 0, where an entry has no gradient in any step and autograd would give 0 · ∞."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)


def _is_optimiser(value: Any) -> bool:
    return (
        isinstance(value, type)
        and issubclass(value, torch.optim.Optimizer)
        and value is not torch.optim.Optimizer
        and value.__name__.lower() not in FIRST_ORDER_ONLY
    )
