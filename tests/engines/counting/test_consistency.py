"""What refutes that an update is the gradient of a batch of the declared size."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.consistency import refutation_of_batch
from dosimeter.network.head import find_head


def refutation(size=6, declared=None, *, dtype=torch.float32, bias=True, change=lambda gradient: gradient, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20, bias=bias)).to(dtype)
    exposure = dm.observe(model, dm.Batch(torch.rand(size, 32, dtype=dtype), torch.randint(0, 20, (size,))), **options)
    head = find_head(exposure)
    head = replace(head, weight_gradient=change(head.weight_gradient))
    return refutation_of_batch(head, declared or size, CrossEntropy(), torch.Generator().manual_seed(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [1, 6, 16])
def test_a_batchs_own_gradient_is_not_refuted(size, dtype):
    assert refutation(size, dtype=dtype) == ""
    assert refutation(size, dtype=dtype, bias=False) == ""


@pytest.mark.parametrize("margin", [8.0, 10.0, 12.0])
def test_a_sure_models_gradient_is_not_refuted_by_the_rounding_of_its_probabilities(margin):
    """Near one, a probability's distance from one is rounded as one is. So the rows of a small gradient miss a sum of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 20))
    with torch.no_grad():
        model[2].bias[3] += margin
    head = find_head(dm.observe(model, dm.Batch(torch.rand(3, 32), torch.tensor([3, 3, 3]))))
    assert 0 < float(head.bias_gradient.abs().max()) < 1e-2
    assert refutation_of_batch(head, 3, CrossEntropy(), torch.Generator().manual_seed(0)) == ""
    noisy = replace(head, bias_gradient=head.bias_gradient + 1e-4 * torch.randn(20))
    assert "bias's gradient do not sum to zero" in refutation_of_batch(noisy, 3, CrossEntropy(), torch.Generator().manual_seed(0))


def test_a_rank_above_the_declared_size_refutes_it():
    assert "rank 6, more than the 5 samples declared" in refutation(6, declared=5)
    assert refutation(6, declared=7) == ""


def test_noise_and_foreign_matrices_are_refuted():
    assert "do not sum to zero" in refutation(change=lambda gradient: gradient + 1e-3 * torch.randn_like(gradient))
    assert "do not sum to zero" in refutation(change=torch.ones_like)


def test_a_bias_beyond_any_probability_is_refuted():
    torch.manual_seed(0)
    model = nn.Linear(8, 5)
    exposure = dm.observe(model, dm.Batch(torch.rand(2, 8), torch.tensor([0, 1])))
    head = find_head(replace(exposure, update={name: 100 * change for name, change in exposure.update.items()}))
    assert "larger than any mean of probabilities" in refutation_of_batch(head, 2, CrossEntropy(), torch.Generator())
