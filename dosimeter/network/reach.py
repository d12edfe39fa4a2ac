"""Everything that a model's code can reach: what its objects hold, and what its classes, functions and globals hold beside them."""

from __future__ import annotations

import dis
import functools
import sys
import types
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

STANDARD = sys.stdlib_module_names - {"collections", "weakref", "queue", "types", "_thread"}  # objects that hold no user's values
MODEL_LIBRARIES = {"torch", "transformers", "peft", "timm"}  # a script may put values on their classes
LIBRARIES = sys.stdlib_module_names | MODEL_LIBRARIES | {"dosimeter", "numpy", "scipy", "safetensors"}  # their own code keeps no samples
IMPORTERS = frozenset({"import_module", "__import__", "__main__"})  # what gives a module by its name, beside `sys.modules`
CALLED_FIRST = ("forward", "__call__")  # the code of a module that a pass runs
ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, types.CodeType)
OF_MODULES = ("_parameters", "_buffers", "_modules")  # dictionaries whose entries a module's users call by their own names
HOLDERS = (Tensor, np.ndarray, list, dict, set, deque)  # what can hold samples, and change
SEQUENCES = (list, tuple, set, frozenset, deque)
FUNCTIONS = (types.FunctionType, staticmethod, classmethod, property, functools.cached_property, functools._lru_cache_wrapper)
GLOBAL_HOOKS = [hooks for name, hooks in vars(nn.modules.module).items() if name.startswith("_global_") and isinstance(hooks, dict)]

Part = tuple[str | None, Any]  # what a value leads to, and the attribute's name where it has one


class Reach:
    """All that is reachable from `roots`, each with a name: through attributes, containers, classes, closures and defaults.

    Of the functions of a class, and of the globals of a file, those count that code reached before mentions by name. So the variables
    of a script are no part of the model that the script defines, also where an attribute of the model has the same name.
    """

    def __init__(self, *roots: Any) -> None:
        self.found: dict[int, tuple[str, Any]] = {}  # by identity; a value that is held keeps its identity
        self.globals: dict[int, tuple[str, dict[str, Any]]] = {}  # of the files whose functions are reached, by identity
        self.mentioned: set[str] = set(CALLED_FIRST)
        self._global_names: set[str] = set()  # of these, the ones that are not attributes of objects alone
        self._as_modules: set[int] = set()  # the files among `globals` whose names may be mentioned as attributes of their module
        for root in roots:
            if not isinstance(root, nn.Module):  # of a loss, a training or a defense every method may run
                self.mentioned.update(name for cls in type(root).__mro__ for name in vars(cls))
        waiting: list[tuple[str, Any]] = [("", root) for root in (*roots, *GLOBAL_HOOKS)]
        while waiting:
            while waiting:
                waiting += self._visit(*waiting.pop())
            waiting = [(name, value) for name, value in self._named() if not isinstance(value, ATOMS) and id(value) not in self.found]

    def arrays(self) -> dict[int, tuple[str, Tensor]]:
        """Tensors, NumPy arrays and lists of numbers by identity, each with its name.

        Parameters are left out, and the buffers of torch's own layers: running statistics are part of every model.
        """
        modules = [value for _, value in self.found.values() if isinstance(value, nn.Module)]
        own = {id(tensor) for module in modules for tensor in _library_state(module)}
        arrays = {key: (name.removeprefix("."), _as_tensor(value)) for key, (name, value) in self.found.items() if key not in own}
        return {key: (name, array) for key, (name, array) in arrays.items() if array is not None and array.numel()}

    def _named(self) -> Iterator[tuple[str, Any]]:
        """What classes and globals hold under names that count."""
        for _, value in list(self.found.values()):
            if isinstance(value, type) and _is_users(value.__module__):
                for name, member in list(vars(value).items()):
                    if name in self.mentioned or not isinstance(member, FUNCTIONS):
                        yield f"{value.__name__}.{name}", member
            elif isinstance(value, type) and value.__module__.partition(".")[0] in MODEL_LIBRARIES:
                yield from ((f"{value.__name__}.{name}", item) for name, item in list(vars(value).items()) if isinstance(item, HOLDERS))
        for key, (file, space) in list(self.globals.items()):
            yield from ((f"{file}.{name}", space[name]) for name in list(space.keys() & self.names_of(key)))

    def names_of(self, file: int) -> set[str]:
        """The names that count of a file in `globals`: those of attributes too where code may hold the file as a module."""
        by_name = ("sys" in self._global_names and "modules" in self.mentioned) or not self.mentioned.isdisjoint(IMPORTERS)
        return self.mentioned if by_name or file in self._as_modules else self._global_names

    def _visit(self, name: str, value: Any) -> list[tuple[str, Any]]:
        """Note a value; return what it leads to."""
        if isinstance(value, ATOMS) or id(value) in self.found:
            return []
        self.found[id(value)] = (name, value)
        return [(name if key is None else f"{name}.{key}", part) for key, part in self._parts(value)]

    def _parts(self, value: Any) -> Iterator[Part]:
        match value:
            case types.ModuleType():
                if _is_users(value.__name__):
                    self.globals[id(vars(value))] = (value.__name__, vars(value))
                    self._as_modules.add(id(vars(value)))
            case type():
                yield from ((None, base) for base in value.__mro__[1:])
            case types.FunctionType():
                yield from self._parts_of_function(value)
            case types.CellType():
                yield from ((None, item) for item in contents_of(value))
            case types.MethodType():
                yield from ((None, part) for part in (value.__func__, value.__self__))
            case types.BuiltinMethodType():
                yield None, value.__self__  # such as the list of `list.append`
            case staticmethod() | classmethod():
                yield None, value.__func__
            case property():
                yield from ((None, part) for part in (value.fget, value.fset))
            case functools.cached_property():
                yield None, value.func
            case functools._lru_cache_wrapper():
                yield None, value.__wrapped__
            case functools.partial():
                yield from ((None, part) for part in (value.func, value.args, value.keywords))
            case dict():
                items = list(dict.items(value))  # a subclass may make its values when it is asked
                yield from ((str(key) if isinstance(key, str) else None, item) for key, item in items)
            case types.MappingProxyType():
                yield from ((str(key) if isinstance(key, str) else None, item) for key, item in list(value.items()))
            case _ if isinstance(value, SEQUENCES):
                yield from ((None, item) for item in list(value))
            case _ if type(value).__module__.partition(".")[0] not in STANDARD:
                yield None, type(value)
                held = list(getattr(value, "__dict__", {}).items()) + list(filled_slots(value).items())
                yield from ((None if name in OF_MODULES else name, part) for name, part in held)

    def _parts_of_function(self, function: types.FunctionType) -> Iterator[Part]:
        """Of a library's function too: a decorator holds the user's function in its closure."""
        yield from zip(function.__code__.co_freevars, function.__closure__ or ())
        yield from ((None, part) for part in (function.__defaults__, function.__kwdefaults__, function.__dict__))
        if _is_users(function.__module__):
            attributes, others = _names_in(function.__code__)
            self.mentioned |= attributes | others
            self._global_names |= others
            yield from ((None, sys.modules[name]) for name in (attributes | others) & sys.modules.keys())  # imported where they are used
            self.globals[id(function.__globals__)] = (str(function.__module__), function.__globals__)


def contents_of(cell: types.CellType) -> list[Any]:
    """What a closure's cell holds: nothing or one value."""
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _is_users(module: str | None) -> bool:
    return (module or "").partition(".")[0] not in LIBRARIES


def _names_in(code: types.CodeType) -> tuple[set[str], set[str]]:
    """The names of attributes in a function's code, and its other names and words; those of inner functions included."""
    others = {constant for constant in code.co_consts if isinstance(constant, str)}
    for step in dis.get_instructions(code):
        if step.opname.endswith(("_NAME", "_GLOBAL", "_GLOBALS", "_FROM")):
            others.add(step.argval)
    attributes = set(code.co_names) - others
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _names_in(constant)
            attributes, others = attributes | inner[0], others | inner[1]
    return attributes, others


def filled_slots(value: Any) -> dict[str, Any]:
    """What an object holds in slots rather than in its dictionary."""
    slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
    names = [name for some in slots for name in ((some,) if isinstance(some, str) else some) if not name.startswith("__")]
    return {name: getattr(value, name) for name in names if hasattr(value, name)}


def _library_state(module: nn.Module) -> Iterator[Tensor]:
    """A module's parameters; and its buffers where the module is torch's own, or derives from torch's layers with running statistics."""
    yield from module.parameters(recurse=False)
    if not _is_users(type(module).__module__) or isinstance(module, nn.modules.batchnorm._NormBase):
        yield from module.buffers(recurse=False)


def _as_tensor(value: Any) -> Tensor | None:
    """A tensor, a NumPy array or a list of numbers as a tensor; None for anything else."""
    if isinstance(value, Tensor):
        return value if value.layout is torch.strided and not value.is_meta and not value.is_complex() else None
    try:
        if isinstance(value, np.ndarray) and value.dtype.kind in "fiub":
            return torch.from_numpy(value.copy())
        if isinstance(value, (list, tuple)) and value and isinstance(value[0], (int, float, list, tuple)):
            return torch.tensor(value, dtype=torch.float64)
    except (TypeError, ValueError, RuntimeError, OverflowError):  # no numbers, of different lengths, or beyond any float
        pass
    return None
