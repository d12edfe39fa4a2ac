"""The batch size from the gradient alone."""

import pytest
import torch

from dosimeter.labels.batch_size import batch_size_of, declared_or_inferred, numerical_rank
from dosimeter.types import Refused


def test_shares_fix_the_size_up_to_a_common_factor_and_the_rank_settles_it():
    shares = torch.tensor([0.5, 0.25, 0.25, 0.0])
    assert batch_size_of(shares) == 4
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    assert batch_size_of(shares, torch.cat([gradient, gradient.flip(1)])) == 8  # rank 8


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_rank_of_a_float32_product_is_its_inner_dimension(rank):
    rng = torch.Generator().manual_seed(rank)
    assert numerical_rank(torch.randn(100, rank, generator=rng) @ torch.randn(rank, 64, generator=rng)) == rank


def test_a_declared_size_is_taken_as_it_is():
    assert declared_or_inferred(7, torch.tensor([0.3, 0.7]), None, "ilrg") == (7, "")


def test_shares_that_no_size_explains_are_refused():
    shares = torch.full((200,), 0.01) + 0.003 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Refused, match="ilrg needs the batch size"):
        declared_or_inferred(None, shares, None, "ilrg")
