"""Noise on one row of the head's gradient."""

import pytest
import torch
from torch import nn

import dosimeter as dm

ROWS = 4000


@pytest.fixture
def sent():
    torch.manual_seed(0)
    model = nn.Linear(ROWS, 5)
    batch = dm.Batch(torch.rand(3, ROWS), torch.tensor([0, 1, 1]))

    def observe(**options):
        defenses = (dm.defense("head_row_noise", **options),) if options else ()
        return dm.observe(model, batch, defenses=defenses, seed=4).update

    return observe


@pytest.mark.parametrize("shape", ["gaussian", "laplace"])
def test_the_longest_row_alone_gets_noise_of_the_standard_deviation(sent, shape):
    plain, noisy = sent(), sent(std=0.3, shape=shape)
    difference = noisy["weight"] - plain["weight"]
    row = int(plain["weight"].sum(1).abs().argmax())
    assert difference.abs().sum(1).nonzero().flatten().tolist() == [row]
    assert float(difference[row].std()) == pytest.approx(0.3, rel=0.06)
    kurtosis = float(((difference[row] / difference[row].std()) ** 4).mean())
    assert kurtosis == pytest.approx(3 if shape == "gaussian" else 6, abs=1)  # of the two distributions
    assert noisy["bias"].equal(plain["bias"])


def test_no_noise_changes_nothing_and_a_negative_one_is_refused(sent):
    assert sent(std=0.0)["weight"].equal(sent()["weight"])
    with pytest.raises(ValueError, match="std"):
        dm.defense("head_row_noise", std=-1.0)
