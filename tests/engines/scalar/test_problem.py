"""One sample's gradient as a function of one scalar, against the formulas by hand."""

import numpy as np
import pytest
import torch

from dosimeter.engines.scalar.problem import off_rank_one, on_host, precision_of, scalar_problem

LABEL = [0.1, 0.0, 0.7, 0.0, 0.2]


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("row", [0, 2, 4])
def test_the_true_scalar_gives_back_the_label_and_the_probabilities(sample, temperature, row) -> None:
    one = sample(LABEL, temperature=temperature)
    problem = scalar_problem(one.head, on_host(one.head.weight_gradient), temperature, "smoothing", row)
    scalar = one.errors[row : row + 1]
    np.testing.assert_allclose(problem.labels(scalar)[0], one.label, atol=1e-12)
    np.testing.assert_allclose(problem.probabilities(scalar)[0], one.probabilities, atol=1e-12)
    np.testing.assert_allclose(problem.row / scalar, one.feature, rtol=1e-10)
    np.testing.assert_allclose(problem.ratios, one.errors / one.errors[row], rtol=1e-10)
    assert problem.sign == np.sign(one.errors[row])


def test_another_scalar_gives_the_softmax_of_the_scaled_feature(sample) -> None:
    one = sample(LABEL)
    problem = scalar_problem(one.head, on_host(one.head.weight_gradient), 1.0, "mixup", 2)
    guesses = np.array([-0.9, 0.3])
    for guess, found in zip(guesses, problem.probabilities(guesses)):
        logits = one.head.weight.numpy() @ (problem.row / guess) + one.head.bias.numpy()
        expected = np.exp(logits - logits.max())
        np.testing.assert_allclose(found, expected / expected.sum(), rtol=1e-10)
    assert problem.free == 2


def test_the_distance_from_rank_one_is_the_rest_of_the_singular_values() -> None:
    rng = np.random.default_rng(0)
    for noise in (1e-10, 1e-4, 0.3):
        gradient = np.outer(rng.normal(size=6), rng.normal(size=9)) + noise * rng.normal(size=(6, 9))
        left, values, right = np.linalg.svd(gradient)
        found = off_rank_one(gradient, left[:, 0] * values[0], right[0])
        assert found == pytest.approx(np.linalg.norm(values[1:]) / np.linalg.norm(values), rel=1e-5)


def test_the_precision_is_the_coarser_of_the_arithmetic_and_the_gradient(sample) -> None:
    one = sample(LABEL, dtype=torch.float32)
    assert precision_of(one.head) == torch.finfo(torch.float32).eps
    assert on_host(torch.ones(2, dtype=torch.bfloat16)).dtype == np.float64
    assert on_host(torch.ones(2)).dtype == np.float32
