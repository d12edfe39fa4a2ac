"""How much memory a matching attack takes, told before it starts."""

from __future__ import annotations

import torch

from dosimeter.client.training import FedAvg
from dosimeter.engines.matching.problem import Problem
from dosimeter.files import readable_size
from dosimeter.memory import MEMORY_VARIABLE, spare_memory
from dosimeter.network.probing import activation_bytes

GRAPH_COPIES = 8  # activations of a second derivative: forward, backward, and both differentiated again
WEIGHT_COPIES = 6  # gradients, their targets and what the optimiser keeps


def memory_lacking(problem: Problem) -> str:
    """Why the attack does not fit into memory, "" where it does. One forward pass of one sample tells its size."""
    model, public = problem.exposure.model, problem.exposure.public
    if problem.device.type != "cpu":
        return ""
    samples = problem.guess.shape[0]
    if isinstance(public.training, FedAvg):  # every local step stays in the graph
        samples = sum(len(range(samples)[piece]) for piece in public.training.pieces(samples))
    parameters = list(model.parameters())
    sample = torch.zeros(1, *public.input_shape, dtype=parameters[0].dtype)
    graph = GRAPH_COPIES * samples * activation_bytes(model, sample)
    needed, free = graph + WEIGHT_COPIES * sum(parameter.nbytes for parameter in parameters), spare_memory()
    if needed <= free:
        return ""
    return f"needs about {readable_size(needed)} of memory, {readable_size(free)} are free; {MEMORY_VARIABLE}=GB sets the limit of a run"
