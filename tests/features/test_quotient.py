"""Class-wise quotients: exact for one sample, close for distinct labels, refused for repeated ones."""

import pytest
import torch

import dosimeter as dm
from dosimeter.types import Refused

from .conftest import errors


@pytest.mark.parametrize("form", ["plain", "fgla"])
def test_one_sample_is_exact(make, form):
    case = make([17], train=False)
    found = dm.recover_features(case.exposure, "quotient", form=form)
    assert float(errors(found, case).max()) < 1e-5
    assert found.labels.tolist() == [17]


def test_the_offset_takes_the_other_samples_out(make):
    case = make([3, 14, 15, 92])
    plain, offset = (dm.recover_features(case.exposure, "quotient", form=form) for form in ("plain", "fgla"))
    assert float(errors(offset, case).max()) < float(errors(plain, case).max())
    assert float(errors(offset, case).max()) < 0.05
    assert not bool(offset.certified.any())


def test_the_formula_by_hand(make):
    case = make([0, 5, 9], classes=12)
    weight, bias = case.exposure.update["3.weight"].double(), case.exposure.update["3.bias"].double()
    absent = [c for c in range(12) if c not in (0, 5, 9)]
    expected = (weight[5] - 2 / 3 * weight[absent].mean(0)) / (bias[5] - 2 / 3 * bias[absent].mean())
    found = dm.recover_features(case.exposure, "quotient", labels=case.labels)
    torch.testing.assert_close(found.features[1].double(), expected, rtol=1e-5, atol=1e-6)


def test_repeated_labels_are_refused_whether_given_or_seen(make):
    case = make([4, 4, 8])
    with pytest.raises(Refused, match="class 4 occurs 2 times"):
        dm.recover_features(case.exposure, "quotient", labels=case.labels)
    with pytest.raises(Refused, match="3 samples show only 2 classes"):
        dm.recover_features(case.exposure, "quotient")


def test_a_head_without_bias_is_refused(make):
    with pytest.raises(Refused, match="bias"):
        dm.recover_features(make([1, 2], bias=False, train=False).exposure, "quotient")
