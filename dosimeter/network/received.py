"""What a layer receives from many samples: passed through the model in pieces, once for all who ask."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from dosimeter.artefacts import fingerprint
from dosimeter.network.model_state import facts_of
from dosimeter.network.probing import input_of, samples_at_once
from dosimeter.network.token_inputs import tensors_of

MOST_KEPT, MOST_KEPT_BYTES = 4, 2**28  # results that are kept for a model, and the size of one


def received_by(model: nn.Module, layer: str, inputs: Any, *, pieces: int | None = None) -> Tensor:
    """What `layer` receives when the model, in its current mode, sees `inputs` in equal pieces, of as many as fit by default: (n, ...).

    The result is kept as long as the model stays the same, also for its copies (`copy_of`): nothing private may go in here. A pass
    that draws random numbers, as dropout does, is not kept.
    """
    facts, training = facts_of(model)
    kept = facts.setdefault("received", {})
    weights = fingerprint(*model.parameters(), *model.buffers())  # writing to `parameter.data` leaves no other trace
    question = (layer, tuple(inputs.shape), fingerprint(*tensors_of(inputs)), weights, pieces, training)
    if question not in kept:
        before = _random_state(inputs)
        count = pieces or -(-len(inputs) // samples_at_once(model, inputs))
        order = torch.arange(len(inputs), device=inputs.device)
        received = torch.cat([input_of(model, layer, inputs[piece]) for piece in order.tensor_split(count)])
        if received.nbytes > MOST_KEPT_BYTES or not torch.equal(before, _random_state(inputs)):
            return received
        while len(kept) >= MOST_KEPT:
            del kept[next(iter(kept))]
        kept[question] = received
    return kept[question]


def _random_state(inputs: Any) -> Tensor:
    """PyTorch's global stream on the inputs' device, from which dropout draws."""
    return torch.cuda.get_rng_state(inputs.device) if inputs.device.type == "cuda" else torch.get_rng_state()
