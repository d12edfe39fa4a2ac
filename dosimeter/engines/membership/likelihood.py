"""How much likelier noise makes an update with a candidate in the batch than without it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def likelihood_scores(sent: Mapping[str, Tensor], terms: Mapping[str, Tensor], floors: Mapping[str, float], batch_size: int) -> Tensor:
    """For each candidate, the log-likelihood of the update with the candidate's term in it over that without, other samples left out: (k,).

    Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022 (LiRA): a likelihood ratio a sample.
    Departure: the noise is known, so that no shadow models are trained. The ratio is
    Σ (⟨u, t⟩ − ‖t‖²/2) / σ² for the update u, the candidate's term t = g/B and the noise σ of each layer.
    """
    total = 0.0
    for name, floor in floors.items():
        term = terms[name].double().flatten(1) / batch_size  # (k, entries)
        seen = sent[name].double().flatten()
        total = total + (term @ seen - term.square().sum(1) / 2) / floor**2
    return torch.as_tensor(total)
