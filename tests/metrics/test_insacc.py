"""Instance-level accuracy, by hand and against Python's multisets."""

from collections import Counter

import pytest
import torch

from dosimeter.registry import METRICS


@pytest.mark.parametrize(
    ("recovered", "truth", "expected"),
    [
        ([4, 2, 2, 0], [4, 2, 2, 0], 1.0),
        ([3, 3, 2, 0], [4, 2, 2, 0], 7 / 9),  # one of eight wrong costs twice: once missing, once too many
        ([8, 0, 0, 0], [4, 2, 2, 0], 4 / 12),
        ([0, 0, 0, 0], [4, 2, 2, 0], 0.0),
        ([4, 0, 0, 0], [4, 2, 2, 0], 0.5),  # counts need not sum to the batch size
        ([0, 0, 0, 0], [0, 0, 0, 0], 1.0),
    ],
)
def test_by_hand(recovered, truth, expected):
    values = METRICS.build("insacc")(torch.tensor(recovered), torch.tensor(truth))
    assert values.shape == (1,)
    assert float(values) == pytest.approx(expected)


def test_is_the_jaccard_similarity_of_multisets():
    rng = torch.Generator().manual_seed(13)
    recovered, truth = torch.randint(0, 7, (2, 24), generator=rng)
    ours, theirs = Counter(recovered.tolist()), Counter(truth.tolist())
    expected = (ours & theirs).total() / (ours | theirs).total()
    counts = [torch.bincount(labels, minlength=7) for labels in (recovered, truth)]
    assert METRICS.build("insacc")(*counts).tolist() == pytest.approx([expected])


def test_refuses_counts_of_other_classes():
    with pytest.raises(ValueError, match="insacc: expected as many"):
        METRICS.build("insacc")(torch.zeros(3), torch.zeros(4))
