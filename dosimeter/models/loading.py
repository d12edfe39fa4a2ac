"""Builds a model from a name, options, a weights file and a seed. A weights file that would run code is refused."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dosimeter.models.named_code import find_function, working_directory_last
from dosimeter.models.weight_files import read_tensors
from dosimeter.options import NonNegativeInt, OptionError, check_fields, first_line
from dosimeter.randomness import generator
from dosimeter.registry import MODELS

WRAPPERS = ("state_dict", "model", "model_state_dict")  # keys under which training scripts put the state dict
PREFIXES = ("module.", "_orig_mod.")  # left by DataParallel and by torch.compile
NAMES_SHOWN = 3  # parameter names in a message


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Which model: a bundled architecture or `module:function`, its weights and mode; other keys go to its builder."""

    name: str = "small_cnn"
    weights: str | None = None
    mode: Literal["train", "eval"] = "eval"
    epochs: NonNegativeInt = 0  # of training on the images that are not private, before the audit
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_fields(self)


def load_model(name: str, options: Mapping[str, Any], weights: str | Path | None, seed: int) -> nn.Module:
    """A model by registry name or `module:function`, drawn from `seed` alone, then filled from `weights` where given.

    The global random state is left as it was. `module:function` is called with `options`, where `allow_code` allows its module.
    """
    with _seed_from(seed):
        model = _call(name, dict(options)) if ":" in name else MODELS.construct(name, dict(options), "model")
    if weights is not None:
        load_weights(model, weights)
    return model


def load_weights(model: nn.Module, path: str | Path) -> None:
    """Fill `model` from a .safetensors file or a state dict saved by torch; every parameter must be there and fit."""
    fill(model, read_state(path), path)


def read_state(path: str | Path) -> dict[str, Tensor]:
    """The state dict of a weights file, without wrappers and name prefixes of training scripts."""
    return without_prefix(_unwrap(read_tensors(Path(path)), path))


def fill(model: nn.Module, state: dict[str, Tensor], path: str | Path) -> None:
    """Load a state dict that came from `path`; every parameter must be there and fit."""
    expected = model.state_dict()
    # Files from before torch 0.4.1 lack batch norm's count of batches, which matters only where the momentum is None.
    missing = [name for name in expected if name not in state and not name.endswith("num_batches_tracked")]
    unexpected = [name for name in state if name not in expected]
    misshapen = [name for name in state if name in expected and state[name].shape != expected[name].shape]
    problems = [f"{len(missing)} missing ({_first_names(missing)})"] if missing else []
    problems += [f"{len(unexpected)} unexpected ({_first_names(unexpected)})"] if unexpected else []
    problems += [f"{n} has shape {tuple(state[n].shape)} where the model has {tuple(expected[n].shape)}" for n in misshapen[:NAMES_SHOWN]]
    problems += [f"{len(misshapen) - NAMES_SHOWN} more of another shape"] if len(misshapen) > NAMES_SHOWN else []
    if problems:
        raise ValueError(f"weights: {path} does not fit the model: {'; '.join(problems)}")
    foreign = [name for name in state if name in expected and not _fits_type(state[name], expected[name])]
    if foreign:
        kinds = f"{state[foreign[0]].dtype} where the model has {expected[foreign[0]].dtype}"
        raise ValueError(f"weights: {path} has {kinds} in {_first_names(foreign)}; numbers would be lost or invented")
    broken = [name for name, tensor in state.items() if tensor.is_floating_point() and not torch.isfinite(tensor).all()]
    if broken:
        raise ValueError(f"weights: {path} has NaN or infinite entries in {_first_names(broken)}")
    model.load_state_dict(state, strict=False)


def _call(name: str, options: dict[str, Any]) -> nn.Module:
    function = find_function(name)
    with working_directory_last():
        try:
            model = function(**options)
        except Exception as error:
            given = ", ".join(f"{key}={value!r}" for key, value in options.items())
            raise OptionError("model", f"{name} failed when called with ({given}): {first_line(error)}") from error
    if not isinstance(model, nn.Module):
        raise OptionError("model", f"{name} must return a torch.nn.Module, got {type(model).__name__}")
    return model


def _unwrap(content: Any, path: str | Path) -> dict[str, Tensor]:
    for wrapper in WRAPPERS:
        if isinstance(content, Mapping) and isinstance(content.get(wrapper), Mapping):
            content = content[wrapper]
            break
    if not isinstance(content, Mapping) or not content or not all(isinstance(value, Tensor) for value in content.values()):
        keys = f"; its keys are {_first_names([str(key) for key in content])}" if isinstance(content, Mapping) and content else ""
        under = ", ".join(repr(wrapper) for wrapper in WRAPPERS)
        raise ValueError(f"weights: {path} holds no state dict (tensors by parameter name, bare or under {under}){keys}")
    return {str(name): tensor for name, tensor in content.items()}


def without_prefix(state: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the model's own names, without what wrappers put before all of them."""
    while state and (prefix := next((prefix for prefix in PREFIXES if all(name.startswith(prefix) for name in state)), "")):
        state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _fits_type(stored: Tensor, expected: Tensor) -> bool:
    """Whether both are real floating point, or neither is: complex numbers lose a part, and integers are no trained weights."""
    kinds = [(tensor.is_floating_point(), tensor.is_complex()) for tensor in (stored, expected)]
    return kinds[0] == kinds[1] and not stored.is_quantized and stored.layout == expected.layout


@contextmanager
def _seed_from(seed: int) -> Iterator[None]:
    """Global random numbers that depend on `seed` alone; the global state is restored afterwards."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(generator(seed, "model").initial_seed())
        yield


def _first_names(names: list[str]) -> str:
    return ", ".join(names[:NAMES_SHOWN]) + (", ..." if len(names) > NAMES_SHOWN else "")
