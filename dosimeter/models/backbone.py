"""A new head on a trained backbone: a file gives all weights except those of the last layer."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from dosimeter.models.loading import fill, read_state


def load_backbone(model: nn.Module, path: Path, *, head: str) -> None:
    """Fill `model` from a weights file except for the layer `head`, whose weights in the file, if any, are left out.

    RGLA attacks such a model: a backbone trained on ImageNet with a new, random head for other classes.
    """
    own = {name: tensor for name, tensor in model.state_dict().items() if name.startswith(f"{head}.")}
    if not own:
        raise ValueError(f"head: the model has no layer {head!r} with weights")
    state = {name: tensor for name, tensor in read_state(path).items() if not name.startswith(f"{head}.")}
    fill(model, state | own, path)
