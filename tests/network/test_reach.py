"""What a model's code reaches, as tensors."""

import torch

from dosimeter.network.reach import _as_tensor


def test_lists_of_numbers_are_samples_too():
    assert torch.equal(_as_tensor([1.0, 2.5]), torch.tensor([1.0, 2.5], dtype=torch.float64))


def test_numbers_beyond_any_float_are_no_samples():
    assert _as_tensor([10**400, 1]) is None
    assert _as_tensor([[1.0], [2.0, 3.0]]) is None
