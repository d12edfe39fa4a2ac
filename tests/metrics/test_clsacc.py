"""Class-level accuracy, by hand and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import jaccard_score

from dosimeter.registry import METRICS


@pytest.mark.parametrize(
    ("recovered", "truth", "expected"),
    [
        ([3, 3, 2, 0], [4, 2, 2, 0], 1.0),
        ([8, 0, 0, 0], [4, 2, 2, 0], 1 / 3),
        ([4, 2, 1, 1], [4, 2, 2, 0], 0.75),
        ([0] * 100, [1] * 8 + [0] * 92, 0.0),  # LeAcc gives .92 for this
    ],
)
def test_by_hand(recovered, truth, expected):
    values = METRICS.build("clsacc")(torch.tensor(recovered), torch.tensor(truth))
    assert values.shape == (1,)
    assert float(values) == pytest.approx(expected)


def test_is_scikit_learns_jaccard_score_of_presence():
    recovered, truth = torch.randint(0, 3, (2, 40), generator=torch.Generator().manual_seed(14))
    expected = jaccard_score(truth.numpy() > 0, recovered.numpy() > 0)
    assert METRICS.build("clsacc")(recovered, truth).tolist() == pytest.approx([expected])


def test_refuses_counts_of_other_classes():
    with pytest.raises(ValueError, match="expected as many"):
        METRICS.build("clsacc")(torch.zeros(3), torch.zeros(4))
