"""What is known of a model as it is: kept until the model changes, and shared with its copies."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from torch import nn

from dosimeter.network.copies import deep_copy

Facts = dict[Any, Any]
EVERY_MODULE_HAS = frozenset(vars(nn.Module()))  # what else a module holds are its own settings
PLAIN, CONTAINERS = frozenset({str, int, float, bool, type(None)}), frozenset({dict, list, set})
_KNOWN: WeakKeyDictionary[nn.Module, tuple[list[object], Facts]] = WeakKeyDictionary()


def facts_of(model: nn.Module) -> tuple[Facts, bool]:
    """What was found out about the model as it is, for callers to read and add to; and whether anything in it is in train mode."""
    state, training = state_of(model)
    known = _KNOWN.get(model)
    if known is None or known[0] != state:
        _KNOWN[model] = known = (state, {})
    return known[1], training


def copy_of(model: nn.Module) -> nn.Module:
    """A deep copy that shares what is known of the model, so that a server with many updates of one model finds it out once."""
    twin = deep_copy(model)
    _KNOWN[twin] = (state_of(twin)[0], facts_of(model)[0])
    return twin


def state_of(model: nn.Module) -> tuple[list[object], bool]:
    """Which modules, tensors and settings a model consists of, how often each tensor was written to; and whether any is in train mode."""
    state: list[object] = []
    training, met = False, set()
    waiting: list[nn.Module | None] = [model]
    while waiting:  # by hand, as every recovery asks, and `modules()` also spells out names
        module = waiting.pop()
        if module is None or id(module) in met:
            continue
        met.add(id(module))
        state.append(id(module))
        training |= module.training
        state.extend(module._forward_pre_hooks)  # by keys that no other hook has
        state.extend(module._forward_hooks)
        settings = vars(module)
        for key in settings.keys() - EVERY_MODULE_HAS:
            value = settings[key]
            state.append(value if type(value) in PLAIN else _entries(value) if type(value) in CONTAINERS else id(value))
        for tensor in (*module._parameters.values(), *module._buffers.values()):
            state.append(id(tensor))
            state.append(None if tensor is None or tensor.is_inference() else tensor._version)
        waiting.extend(module._modules.values())
    return state, training


def _entries(container: Any) -> list[object]:
    """What a list, a set or a dictionary of settings holds, plain values as they are and the rest by identity."""
    entries = [*container, *container.values()] if isinstance(container, dict) else container
    return [entry if type(entry) in PLAIN else id(entry) for entry in entries]
