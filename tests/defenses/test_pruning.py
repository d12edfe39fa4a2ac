import numpy
import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator

RNG = generator(0, "unused")


def test_the_smallest_magnitudes_of_each_layer_go():
    update = {"a": torch.tensor([0.5, -3.0, 1.0, -0.1]), "b": torch.tensor([100.0, 200.0])}
    sent = dm.defense("pruning", ratio=0.5).protect(update, RNG)
    assert sent["a"].tolist() == [0.0, -3.0, 1.0, 0.0]
    assert sent["b"].tolist() == [0.0, 200.0]


def test_update_scope_compares_all_layers():
    update = {"a": torch.tensor([0.5, -3.0, 1.0, -0.1], dtype=torch.float64), "b": torch.tensor([100.0, 200.0], dtype=torch.bfloat16)}
    sent = dm.defense("pruning", ratio=0.5, scope="update").protect(update, RNG)
    assert sent["a"].tolist() == [0.0, -3.0, 0.0, 0.0]
    assert sent["b"].tolist() == [100.0, 200.0]
    assert sent["b"].dtype == torch.bfloat16


@pytest.mark.parametrize("ratio", [0.1, 0.29, 0.8, 0.99, 0.999])
def test_agrees_with_a_sort(ratio):
    gradient = torch.randn(40, 50, generator=generator(3, "gradient"))
    sent = dm.defense("pruning", ratio=ratio).protect({"a": gradient}, RNG)["a"].numpy()
    order = numpy.argsort(numpy.abs(gradient.numpy()), axis=None)
    expected = gradient.numpy().copy().ravel()
    expected[order[: round(ratio * 2000)]] = 0
    assert (sent.ravel() == expected).all()


def test_ties_are_broken_so_that_the_count_is_exact():
    sent = dm.defense("pruning", ratio=0.75).protect({"a": torch.ones(8)}, RNG)
    assert sent["a"].sum().item() == 2


def test_a_ratio_above_one_is_refused():
    with pytest.raises(ValueError, match=r"defense\.ratio: expected a number in \[0, 1\]"):
        dm.defense("pruning", ratio=80)
