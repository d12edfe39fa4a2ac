"""What passes leave behind in a model's code, and how it is undone.

A deep copy of a model shares its code. So what the code keeps in classes, globals, closures and caches of functions outlives a copy
that is thrown away.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import _lru_cache_wrapper, partial
from itertools import zip_longest
from types import BuiltinMethodType, CellType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dosimeter.network.reach import Reach, contents_of, filled_slots

Undo = Callable[[], None]


@contextmanager
def nothing_kept(*roots: Any) -> Iterator[None]:
    """Afterwards all that `roots` reach is as before, whatever their code kept of what it saw inside: a model, a loss, a training."""
    reach = Reach(*roots)
    weights = {id(tensor) for _, value in reach.found.values() if isinstance(value, nn.Module) for tensor in _tensors_of(value)}
    undo = [_undo_of(value) for key, (_, value) in reach.found.items() if key not in weights]
    undo += [_undo_of_globals(space, reach.names_of(key)) for key, (_, space) in reach.globals.items()]
    try:
        yield
    finally:
        for step in filter(None, undo):
            step()


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    """Parameters and buffers, which no pass of ours writes into."""
    yield from module.parameters(recurse=False)
    yield from module.buffers(recurse=False)


def _undo_of(value: Any) -> Undo | None:
    """How a value gets its present contents again; None where it cannot change."""
    match value:
        case Tensor():
            return partial(_refill_tensor, value, value.detach().clone()) if value.layout is torch.strided and not value.is_meta else None
        case np.ndarray():
            return partial(_refill_array, value, value.copy())
        case list() | deque():
            return partial(_refill_sequence, value, list(value))
        case dict():
            return partial(_refill_dictionary, value, dict(dict.items(value)))  # a subclass may make its values when it is asked
        case set():
            return partial(_refill_set, value, set(value))
        case CellType():
            return partial(_refill_cell, value, contents_of(value))
        case type():
            return partial(_restore_class, value, dict(vars(value)))
        case _lru_cache_wrapper():
            return value.cache_clear
        case tuple() | frozenset() | ModuleType() | MethodType() | BuiltinMethodType():
            return None
    return partial(_restore_object, value, dict(getattr(value, "__dict__", {})), filled_slots(value))


def _undo_of_globals(space: dict[str, Any], names: set[str]) -> Undo:
    """Only the names that the code mentions: another thread may set others meanwhile."""
    before = {name: space[name] for name in names & space.keys()}

    def undo() -> None:
        for name in names & space.keys() - before.keys():
            del space[name]
        space.update(before)

    return undo


def _same(one: Iterable[Any], other: Iterable[Any]) -> bool:
    """Whether two sequences hold the very same objects."""
    return all(a is b for a, b in zip_longest(one, other, fillvalue=one))


def _refill_tensor(tensor: Tensor, before: Tensor) -> None:
    if tensor.shape != before.shape:
        tensor.data = before
    elif not torch.equal(tensor, before):
        with torch.no_grad():
            tensor.copy_(before)


def _refill_array(array: np.ndarray, before: np.ndarray) -> None:
    if array.shape == before.shape and array.flags.writeable:
        array[...] = before


def _refill_sequence(sequence: list[Any] | deque[Any], before: list[Any]) -> None:
    if not _same(sequence, before):
        sequence.clear()
        sequence.extend(before)


def _refill_dictionary(dictionary: dict[Any, Any], before: dict[Any, Any]) -> None:
    if not (_same(dict.keys(dictionary), before) and _same(dict.values(dictionary), before.values())):
        dictionary.clear()
        dictionary.update(before)


def _refill_set(values: set[Any], before: set[Any]) -> None:
    values.clear()
    values.update(before)


def _refill_cell(cell: CellType, before: list[Any]) -> None:
    if before:
        cell.cell_contents = before[0]
    elif contents_of(cell):
        del cell.cell_contents


def _restore_class(cls: type, before: dict[str, Any]) -> None:
    now = dict(vars(cls))
    for name in now.keys() - before.keys():
        type.__delattr__(cls, name)
    for name, value in before.items():
        if now.get(name, before) is not value:
            type.__setattr__(cls, name, value)


def _restore_object(holder: Any, held: dict[str, Any], slots: dict[str, Any]) -> None:
    """Past the object's own way to set an attribute, which a frozen dataclass forbids."""
    if isinstance(getattr(holder, "__dict__", None), dict):  # of some objects it is a view, which nothing can have filled
        _refill_dictionary(holder.__dict__, held)
    for name in filled_slots(holder).keys() - slots.keys():
        object.__delattr__(holder, name)
    for name, value in slots.items():
        object.__setattr__(holder, name, value)
