"""Label existence accuracy, by hand and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import accuracy_score

from dosimeter.registry import METRICS


@pytest.mark.parametrize(
    ("recovered", "truth", "expected"),
    [
        ([4, 2, 2, 0], [4, 2, 2, 0], 1.0),
        ([3, 3, 2, 0], [4, 2, 2, 0], 1.0),  # wrong numbers, right classes
        ([8, 0, 0, 0], [4, 2, 2, 0], 0.5),
        ([0] * 100, [1] * 8 + [0] * 92, 0.92),  # finding nothing scores high: its null says so
        ([0, 4], [4, 0], 0.0),
    ],
)
def test_by_hand(recovered, truth, expected):
    values = METRICS.build("leacc")(torch.tensor(recovered), torch.tensor(truth))
    assert values.shape == (1,)
    assert float(values) == pytest.approx(expected)


def test_is_scikit_learns_accuracy_of_presence():
    recovered, truth = torch.randint(0, 3, (2, 40), generator=torch.Generator().manual_seed(11))
    expected = accuracy_score(truth.numpy() > 0, recovered.numpy() > 0)
    assert METRICS.build("leacc")(recovered, truth).tolist() == pytest.approx([expected])


def test_refuses_counts_of_other_classes():
    with pytest.raises(ValueError, match="leacc: expected as many"):
        METRICS.build("leacc")(torch.zeros(3), torch.zeros(4))
