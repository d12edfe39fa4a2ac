"""Label number accuracy, by hand and against scikit-learn."""

import pytest
import torch
from sklearn.metrics import accuracy_score

from dosimeter.registry import METRICS


@pytest.mark.parametrize(
    ("recovered", "truth", "expected"),
    [
        ([4, 2, 2, 0], [4, 2, 2, 0], 1.0),
        ([3, 3, 2, 0], [4, 2, 2, 0], 0.5),  # the absent class counts as right
        ([8, 0, 0, 0], [4, 2, 2, 0], 0.25),
        ([0] * 100, [1] * 8 + [0] * 92, 0.92),
    ],
)
def test_by_hand(recovered, truth, expected):
    values = METRICS.build("lnacc")(torch.tensor(recovered), torch.tensor(truth))
    assert values.shape == (1,)
    assert float(values) == pytest.approx(expected)


def test_is_scikit_learns_accuracy_of_counts_and_never_above_leacc():
    recovered, truth = torch.randint(0, 3, (2, 40), generator=torch.Generator().manual_seed(12))
    value = METRICS.build("lnacc")(recovered, truth)
    assert value.tolist() == pytest.approx([accuracy_score(truth.numpy(), recovered.numpy())])
    assert float(value) <= float(METRICS.build("leacc")(recovered, truth))


def test_refuses_counts_of_other_classes():
    with pytest.raises(ValueError, match="lnacc: expected as many"):
        METRICS.build("lnacc")(torch.zeros(3), torch.zeros(4))
