"""Label counts by regression: of simulated clients' counts on what their updates show."""

from __future__ import annotations

import torch
from torch import Tensor

from dosimeter.linear_fit import linear_fit

PENALTIES = (1e-3, 1e-2, 0.1, 1.0, 10.0, 100.0, 1e3, 1e9)  # of the ridge; the last leaves the pooled fit alone
TINY = 1e-12


def regress_counts(statistics: Tensor, counts: Tensor, sent: Tensor) -> tuple[Tensor, Tensor]:
    """The counts (C,) that belong to the sent statistics (S, c), and each count's error left out of the fit: (C,).

    `statistics` (K, S, c) and `counts` (K, C) are those of simulated clients. A first fit has one slope for each statistic, the same for
    all classes, from a class's own statistics to its count. A ridge regression on the statistics of all classes explains what is left.
    Its penalty has the smallest error of leaving one client out.
    """
    mean, middle = statistics.mean(0), counts.double().mean(0)
    scale = (statistics - mean).square().mean((0, 2)).sqrt()[:, None] + TINY  # (S, 1)
    shown, asked, wanted = (statistics - mean) / scale, (sent - mean) / scale, counts.double() - middle
    if shown.shape[2] != wanted.shape[1]:  # one logit for two answers
        shown, asked = (torch.cat([-one, one], dim=-1) for one in (shown, asked))
    pooled = linear_fit(shown.transpose(1, 2).flatten(0, 1), wanted.flatten()[:, None])[:, 0]  # (S,)
    left = wanted - torch.einsum("ksc,s->kc", shown, pooled)
    rest, errors = _ridge(shown.flatten(1), left, asked.flatten())
    return middle + pooled @ asked + rest, errors


def _ridge(inputs: Tensor, wanted: Tensor, asked: Tensor) -> tuple[Tensor, Tensor]:
    """What the best penalty predicts at `asked` (S·C,): (C,), and the errors (C,) of predicting a client by the others.

    The slopes themselves, (S·C, C), are not built: of many classes they would take gigabytes.
    """
    left, sizes, right = torch.linalg.svd(inputs, full_matrices=False)
    best: tuple[float, Tensor, Tensor] | None = None
    for penalty in PENALTIES:
        kept = sizes.square() / (sizes.square() + penalty)
        leverage = (left.square() * kept).sum(1, keepdim=True) + 1 / len(inputs)
        missed = (wanted - (left * kept) @ (left.T @ wanted)) / (1 - leverage).clamp_min(TINY)
        errors = missed.square().mean(0).sqrt()
        predicted = (sizes / (sizes.square() + penalty) * (right @ asked)) @ (left.T @ wanted)
        if best is None or float(errors.square().sum()) < best[0]:
            best = float(errors.square().sum()), predicted, errors
    assert best is not None
    return best[1], best[2]
