"""The batch size from the gradient alone."""

import pytest
import torch

from dosimeter.engines.counting.batch_size import batch_size_of, declared_or_inferred, numerical_rank
from dosimeter.types import Outcome, Refused


def test_shares_fix_the_size_up_to_a_common_factor_and_the_rank_settles_it():
    shares = torch.tensor([0.5, 0.25, 0.25, 0.0])
    assert batch_size_of(shares) == 4
    gradient = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)) @ torch.randn(6, 9, generator=torch.Generator().manual_seed(1))
    assert batch_size_of(shares, numerical_rank(torch.cat([gradient, gradient.flip(1)]))) == 8  # rank 8


@pytest.mark.parametrize("rank", [1, 5, 20])
def test_rank_of_a_float32_product_is_its_inner_dimension(rank):
    rng = torch.Generator().manual_seed(rank)
    assert numerical_rank(torch.randn(100, rank, generator=rng) @ torch.randn(rank, 64, generator=rng)) == rank


def test_a_declared_size_is_taken_as_it_is():
    assert declared_or_inferred(7, torch.tensor([0.3, 0.7]), None, "ilrg") == (7, Outcome.COMPLETED, "")


def test_shares_that_no_size_explains_are_refused():
    shares = torch.full((200,), 0.01) + 0.003 * torch.randn(200, generator=torch.Generator().manual_seed(0))
    with pytest.raises(Refused, match="ilrg needs the batch size"):
        declared_or_inferred(None, shares, None, "ilrg")


def test_a_rank_in_place_of_an_explained_size_is_a_guess_and_says_so():
    rng = torch.Generator().manual_seed(1)
    shares = torch.full((20,), 0.05) + 0.003 * torch.randn(20, generator=rng)
    gradient = torch.randn(20, 6, generator=rng) @ torch.randn(6, 30, generator=rng)
    assert batch_size_of(shares, 6) is None
    size, outcome, message = declared_or_inferred(None, shares, gradient, "ilrg")
    assert (size, outcome) == (6, Outcome.PARTIAL)
    assert "no size up to 4096" in message
    assert "explains the gradient" not in message
    exact = torch.zeros(20).index_fill(0, torch.tensor([3, 7]), 0.5)
    assert declared_or_inferred(None, exact, gradient, "ilrg")[:2] == (6, Outcome.COMPLETED)


def test_a_size_that_one_of_so_many_had_to_be_by_chance_is_none():
    rng = torch.Generator().manual_seed(5)
    noise = torch.rand(100, 5, generator=rng, dtype=torch.float64)
    assert sum(batch_size_of(shares / shares.sum(), 4) is not None for shares in noise) <= 10
    counts = torch.tensor([17.0, 5.0, 11.0, 3.0, 1.0], dtype=torch.float64)  # nothing in common
    assert batch_size_of(counts / 37) == 37
    assert batch_size_of(counts / 37 + 1e-4 * torch.randn(5, generator=rng, dtype=torch.float64)) == 37
