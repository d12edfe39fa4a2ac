"""Where a run computes: on the device that is asked for, else on a GPU where there is one."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from dosimeter.network.copies import deep_copy
from dosimeter.types import Batch, NamedInputs

_log = logging.getLogger("dosimeter")


def choose_device(device: str | None, *, like: nn.Module | None = None) -> torch.device:
    """The device that is named. "auto" or None: a GPU where there is one, else where the model is, else the CPU."""
    if device not in (None, "auto"):
        check_device(str(device))
        return torch.device(str(device))
    here = next(iter(like.parameters()), torch.zeros(())).device if isinstance(like, nn.Module) else torch.device("cpu")
    if here.type == "cpu" and torch.cuda.is_available():
        here = torch.device("cuda")
        _log.info("on %s", device_name(here))
    return here


def check_device(device: str) -> None:
    try:
        torch.zeros(1, device=device).item()
    except Exception as error:  # an unknown or absent device fails in many ways
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"device: {device!r} cannot be used here: {reason}") from None


def device_name(device: torch.device) -> str:
    """A device for people: its kind, and the name of a GPU."""
    return f"{device.type} ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else device.type


def model_on(model: nn.Module, device: torch.device) -> nn.Module:
    """The model itself where it is on the device already, else a copy there."""
    if not isinstance(model, nn.Module):
        return model  # which is refused with a sentence later
    places = {tensor.device.type for tensor in (*model.parameters(), *model.buffers())}
    return model if places <= {device.type} else deep_copy(model).to(device)


def to_device(samples: Any, device: torch.device) -> Any:
    """The samples there; the same object where they are there already."""
    if not isinstance(samples, Batch):
        return samples  # what is no batch is refused later, with a sentence
    inputs, targets = (_to_device(value, device) for value in (samples.inputs, samples.targets))
    return samples if inputs is samples.inputs and targets is samples.targets else Batch(inputs, targets)


def _to_device(value: Any, device: torch.device) -> Any:
    if isinstance(value, NamedInputs):
        return value if value.device.type == device.type else value.each(lambda tensor: tensor.to(device))
    return value.to(device) if isinstance(value, torch.Tensor) and value.device.type != device.type else value
