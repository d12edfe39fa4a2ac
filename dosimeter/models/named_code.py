"""Models that a configuration names as `module:function`. Their code runs only where the user has allowed the module by its name."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, get_type_hints

from torch import nn

from dosimeter.options import OptionError, first_line

NO_MODELS = frozenset({"torch", "numpy", "scipy", "safetensors", "pip", "setuptools", "pkg_resources", "pytest"})
"""Packages whose functions build no model. Some of them load, compile or run code that an option names."""

_allowed: ContextVar[frozenset[str]] = ContextVar("allowed modules", default=frozenset())
_announce: ContextVar[Callable[[str], None] | None] = ContextVar("announcement of imports", default=None)


@contextmanager
def allow_code(modules: Iterable[str], announce: Callable[[str], None] | None = None) -> Iterator[None]:
    """Inside this block, a configuration may name models in these modules. `announce` hears which file each one comes from."""
    tokens = _allowed.set(frozenset(modules)), _announce.set(announce)
    try:
        yield
    finally:
        _allowed.reset(tokens[0])
        _announce.reset(tokens[1])


def allowed_modules() -> frozenset[str]:
    """The modules that the surrounding block allows, for a process that is started there."""
    return _allowed.get()


def module_of(name: object) -> str | None:
    """The module of `module:function`, or None where the name is not of this form."""
    return name.partition(":")[0] if isinstance(name, str) and ":" in name else None


def find_function(name: str) -> Callable[..., Any]:
    """The class or function that `module:function` names: a class of models, or a function that the module's own package defines.

    The module must be allowed. Installed packages come before the working directory, so a local file shadows none of them.
    """
    module_name, _, function_name = name.partition(":")
    if not function_name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise OptionError("model", f"expected a registered name or module:function, got {name!r}")
    check_allowed(name)
    with working_directory_last():
        module = _import(module_name)
    if not hasattr(module, function_name):
        close = get_close_matches(function_name, vars(module), 1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise OptionError("model", f"the module {module_name!r} has no {function_name!r}{hint}")
    return _checked(getattr(module, function_name), module_name, name)


@contextmanager
def working_directory_last() -> Iterator[None]:
    """Modules are searched for among the installed packages, and then in the working directory."""
    before, here = list(sys.path), os.getcwd()
    sys.path[:] = [folder for folder in sys.path if folder not in ("", here)] + [here]
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path[:] = before


def check_allowed(name: str) -> None:
    """Refuse `module:function` where the surrounding block does not allow its module."""
    module_name = name.partition(":")[0]
    if module_name.partition(".")[0] in sys.stdlib_module_names:
        raise OptionError("model", f"{name!r} is in Python's standard library, which holds no model, so it is not run")
    if module_name not in _allowed.get():
        raise OptionError(
            "model", f"{name!r} is code, which a configuration alone does not run; if you trust it, add --allow-code {module_name}"
        )


def _import(module_name: str) -> ModuleType:
    announce = _announce.get()
    try:
        if announce is not None:
            announce(f"imports {module_name} from {_origin(module_name.partition('.')[0])}")
        return importlib.import_module(module_name)
    except Exception as error:
        where = f"from the installed packages or {Path.cwd()}"
        raise OptionError("model", f"cannot import {module_name!r} {where}: {first_line(error)}") from error


def _origin(package: str) -> str:
    """The file that the import of a package or module begins with. Finding it runs no code."""
    spec = importlib.util.find_spec(package)
    if spec is None:
        raise ModuleNotFoundError(f"No module named {package!r}")
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "an unknown place")


def _checked(found: Any, module_name: str, name: str) -> Callable[..., Any]:
    if isinstance(found, type) and issubclass(found, nn.Module):
        return found
    if not isinstance(found, FunctionType):
        expected = "a class of torch.nn.Module or a Python function that returns a torch.nn.Module"
        raise OptionError("model", f"expected {name!r} to be {expected}, got {type(found).__name__}")
    home = str(found.__module__)
    if home.partition(".")[0] != module_name.partition(".")[0]:
        raise OptionError("model", f"{name!r} is a function of {home!r}; name and allow that module, or wrap the function in one of yours")
    if home.partition(".")[0] in NO_MODELS:
        raise OptionError("model", f"{name!r} is a function of {home!r}, which builds no model; name a class of torch.nn.Module")
    promised = _promised(found)
    if isinstance(promised, type) and promised is not object and not issubclass(promised, nn.Module):
        raise OptionError("model", f"expected {name!r} to return a torch.nn.Module, but it is declared to return {promised.__name__}")
    return found


def _promised(function: FunctionType) -> Any:
    """What a function is declared to return; `object` where it does not say, or says what cannot be looked up."""
    try:
        return get_type_hints(function).get("return", object)
    except Exception:
        return object
