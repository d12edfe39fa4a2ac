"""One stream a role: the same for the same seed and role, another for any other, and the global one given back."""

import pytest
import torch

from dosimeter.randomness import generator, global_seed, secret_of


@pytest.fixture(autouse=True)
def _streams_of_other_tests_stay():
    with torch.random.fork_rng():
        yield


def draw(seed: int, role: str) -> torch.Tensor:
    return torch.rand(8, generator=generator(seed, role))


def test_seed_and_role_decide_the_stream():
    assert torch.equal(draw(3, "noise"), draw(3, "noise"))
    others = [draw(3, "noise"), draw(4, "noise"), draw(3, "labels"), draw(0, "3/noise"), draw(-3, "noise")]
    assert len(torch.stack(others).unique(dim=0)) == len(others)


def test_the_global_stream_is_set_and_given_back():
    torch.manual_seed(1)
    expected = torch.rand(4)
    torch.manual_seed(1)
    with global_seed(5, "attack"):
        inside = torch.rand(4)
    assert torch.equal(torch.rand(4), expected)
    torch.manual_seed(99)
    with global_seed(5, "attack"):
        assert torch.equal(torch.rand(4), inside)
    with global_seed(6, "attack"):
        assert not torch.equal(torch.rand(4), inside)


def test_an_error_inside_gives_the_global_stream_back_too():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    with pytest.raises(RuntimeError, match="negative dimension"), global_seed(5, "attack"):
        torch.rand(torch.randint(-9, -1, ()))  # draws, then fails
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_secret_makes_another_stream_that_only_its_holder_repeats():
    secret, other = secret_of(torch.tensor([1.0, 2.0])), secret_of(torch.tensor([1.0, 2.5]))
    first, again = (torch.randn(1000, generator=generator(3, "noise", secret=secret)) for _ in range(2))
    assert torch.equal(first, again)
    assert abs(float(first.mean())) < 0.15
    assert 0.9 < float(first.std()) < 1.1
    for stranger in (generator(3, "noise"), generator(3, "noise", secret=other), generator(4, "noise", secret=secret)):
        assert not torch.equal(torch.randn(1000, generator=stranger), first)


def test_a_secret_stream_is_not_one_of_those_that_32_bits_can_seed():
    hidden = generator(3, "noise", secret=secret_of(torch.ones(2)))
    searched = torch.Generator().manual_seed(hidden.initial_seed() & 0xFFFFFFFF)
    assert not torch.equal(torch.rand(8, generator=hidden), torch.rand(8, generator=searched))
    with global_seed(3, "noise", secret_of(torch.ones(2))):
        inside = torch.rand(8)
    assert torch.equal(inside, torch.rand(8, generator=generator(3, "noise", secret=secret_of(torch.ones(2)))))
