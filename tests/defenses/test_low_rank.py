import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator


def _random(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed, "matrix"), dtype=torch.float64)


def test_a_matrix_of_that_rank_passes_unchanged():
    matrix = _random(20, 3) @ _random(3, 30, seed=1)
    sent = dm.defense("low_rank", rank=3).protect({"a": matrix}, generator(0, "start"))["a"]
    assert torch.allclose(sent, matrix, atol=1e-10)


def test_many_iterations_reach_the_best_approximation():
    matrix = _random(12, 17)
    sent = dm.defense("low_rank", rank=2, iterations=300).protect({"a": matrix}, generator(0, "start"))["a"]
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    best = left[:, :2] * values[:2] @ right[:2]
    assert torch.allclose(sent, best, atol=1e-6)


def test_one_iteration_has_the_rank_and_never_exceeds_the_norm():
    kernel = _random(8, 3, 5, 5)
    sent = dm.defense("low_rank", rank=2).protect({"a": kernel}, generator(4, "start"))["a"]
    assert torch.linalg.matrix_rank(sent.flatten(1)) == 2
    assert 0 < sent.norm() < kernel.norm()


def test_vectors_pass_as_they_are():
    bias = _random(9)
    assert torch.equal(dm.defense("low_rank", rank=1).protect({"b": bias}, generator(0, "start"))["b"], bias)


def test_rank_zero_is_refused():
    with pytest.raises(ValueError, match=r"defense\.rank: expected a positive int"):
        dm.defense("low_rank", rank=0)
