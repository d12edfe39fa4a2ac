"""LLG and its two variants with measured impact."""

import pytest
import torch
from torch import Tensor, nn

from dosimeter.client.losses import CrossEntropy, Focal
from dosimeter.client.receive import receive
from dosimeter.labels.llg import fill_by_impact
from dosimeter.runs.server import recover_labels
from dosimeter.types import Refused

FOUR_TWO_TWO = [0, 0, 0, 0, 1, 1, 2, 2]


def one_by_one(sums: Tensor, impact: float, size: int) -> list[int]:
    """Algorithm 1 of the paper, a sample at a time."""
    left, counts = sums.clone(), [0] * len(sums)
    for label in torch.nonzero(sums < 0).flatten().tolist():
        counts[label] += 1
        left[label] -= impact
    while sum(counts) < size:
        label = int(left.argmin())
        counts[label] += 1
        left[label] -= impact
    return counts


@pytest.mark.parametrize("seed", range(10))
def test_filling_at_once_equals_the_published_loop(seed):
    sums = torch.randn(12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    impact = float((1 + 1 / 12) * sums.clamp_max(0).sum() / 30)
    assert fill_by_impact(sums, torch.tensor(impact), 30).counts.tolist() == one_by_one(sums, impact, 30)


@pytest.mark.parametrize("method", ["llg", "llg_plus", "llg_star"])
def test_counts_four_two_two_come_back_as_four_two_two(expose, method):
    estimate = recover_labels(expose(FOUR_TWO_TWO, classes=50, auxiliary_per_class=4), method)
    assert estimate.counts[:3].tolist() == [4, 2, 2]
    assert estimate.counts.sum() == 8


@pytest.mark.parametrize("classes", [6, 10, 30])
@pytest.mark.parametrize("seed", range(5))
def test_counts_come_back_from_small_nets_where_the_published_impact_misses_some(expose, classes, seed):
    exposure = expose(FOUR_TWO_TWO, classes=classes, seed=seed)
    assert recover_labels(exposure, "llg").counts.tolist() == [4, 2, 2] + [0] * (classes - 3)


def test_with_even_probabilities_the_estimate_is_the_counts_and_the_published_one_is_not():
    """Rows that sum to σ (1/C − n/B) exactly, σ = 5."""
    counts = torch.tensor([4.0, 2.0, 2.0, 0, 0, 0], dtype=torch.float64)
    sums = 5 * (1 / 6 - counts / 8)
    model = nn.Sequential(nn.ReLU(), nn.Linear(1, 6, bias=False))
    exposure = receive(model, {"1.weight": sums[:, None].float()}, input_shape=(1,), batch_size=8)
    estimate, published = recover_labels(exposure, "llg").scores, recover_labels(exposure, "llg", as_published=True).scores
    assert estimate is not None
    assert published is not None
    assert torch.allclose(estimate, counts, atol=1e-5)
    assert not torch.allclose(published, counts, atol=0.3)


def test_measured_offsets_bring_back_classes_whose_row_is_positive(expose):
    """Three samples of a class in forty leave its row positive: LLG as published misses them all, LLG+ does not."""
    labels = [0] * 28 + [1] * 9 + [2] * 3
    exposure = expose(labels, classes=10, auxiliary_per_class=20)
    truth = torch.tensor([28, 9, 3] + [0] * 7)
    plain, measured = recover_labels(exposure, "llg", as_published=True).counts, recover_labels(exposure, "llg_plus").counts
    assert plain[2] == 0
    assert measured[2] > 0
    assert (measured - truth).abs().sum() < (plain - truth).abs().sum()


def test_a_missing_batch_size_or_a_loss_beyond_the_theory_is_refused(expose):
    with pytest.raises(Refused, match="llg needs the batch size"):
        recover_labels(expose(FOUR_TWO_TWO, declare=False), "llg")
    with pytest.raises(Refused, match="label smoothing"):
        recover_labels(expose(FOUR_TWO_TWO, loss=CrossEntropy(smoothing=0.1)), "llg")
    with pytest.raises(Refused, match="llg_star writes down"):
        recover_labels(expose(FOUR_TWO_TWO, loss=Focal()), "llg_star")
    with pytest.raises(Refused, match="auxiliary data"):
        recover_labels(expose(FOUR_TWO_TWO), "llg_plus")
