"""Least squares gives the same digits every time."""

import torch

from dosimeter.linear_fit import linear_fit


def test_the_same_system_has_the_same_answer_to_the_bit():
    """Memory that integers have left behind must not choose the pivots."""
    rng = torch.Generator().manual_seed(0)
    system, wanted = (torch.randn(4, 128, dtype=torch.float64, generator=rng).T for _ in range(2))
    first = linear_fit(system, wanted)
    for count in range(200):
        torch.randint(1, 5, (count % 7 + 1,), dtype=torch.int32)
        assert torch.equal(linear_fit(system, wanted), first)


def test_the_answer_solves_the_normal_equations():
    rng = torch.Generator().manual_seed(1)
    system, wanted = torch.randn(3, 9, 4, dtype=torch.float64, generator=rng), torch.randn(3, 9, 2, dtype=torch.float64, generator=rng)
    found = linear_fit(system, wanted)
    torch.testing.assert_close(system.mT @ (system @ found), system.mT @ wanted)


def test_of_many_answers_the_shortest_is_given():
    found = linear_fit(torch.tensor([[1.0, 1.0], [2.0, 2.0]]), torch.tensor([[2.0], [4.0]]))
    torch.testing.assert_close(found, torch.ones(2, 1))
