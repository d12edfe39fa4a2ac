"""iLRG's approximations: exact where their premises hold, and as large as they must be elsewhere."""

import pytest
import torch

from dosimeter.runs.reproduction.studies.class_embeddings import ClassEmbeddings


def test_samples_of_a_class_that_are_alike_leave_the_first_and_third_approximation_no_error(client_with, rng):
    feature, other = torch.rand(2, 6, generator=rng)
    features = torch.stack([feature, feature, other])
    found = ClassEmbeddings()(client_with(features, torch.tensor([1, 1, 0]), torch.randn(4, 6, generator=rng)), rng)
    assert found["approximation1_mse"] == pytest.approx(0, abs=1e-20)
    assert found["approximation3_mse"] == pytest.approx(0, abs=1e-20)
    assert found["approximation2_mse"] > 0


def test_one_shared_feature_is_recovered_although_the_second_approximation_is_wrong(client_with, rng):
    """Section 3.1, "Bypass Approx 2 when untrained"."""
    features = torch.rand(1, 6, generator=rng).expand(5, 6)
    found = ClassEmbeddings()(client_with(features, torch.tensor([0, 1, 1, 2, 2]), torch.randn(4, 6, generator=rng)), rng)
    assert found["approximation2_mre"] > 0.1
    assert found["embedding_mse"] == pytest.approx(0, abs=1e-12)
    assert found["embedding_cosine"] == pytest.approx(1)
    assert found["soteria_cosine"] == pytest.approx(1)
    assert found["soteria_mse"] > 1e-3


def test_a_zero_head_gives_the_second_approximation_the_error_of_uniform_probabilities(client_with, rng):
    """With p = 1/C and one sample a class: class i keeps (1/C − 1)/B of (1/C − 1)/B + (B − 1)/(B C)."""
    found = ClassEmbeddings()(client_with(torch.rand(2, 6, generator=rng), torch.tensor([0, 1]), torch.zeros(4, 6)), rng)
    own, absent = 1 / 8, 2 / 8  # of the two classes that occur, and of the two that do not
    assert found["approximation2_mse"] == pytest.approx((2 * own**2 + 2 * absent**2) / 4)
    assert found["approximation2_mre"] == pytest.approx((2 * own / abs(-3 / 8 + 1 / 8) + 2 * 1) / 4)
