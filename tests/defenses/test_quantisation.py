import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import dosimeter as dm
from dosimeter.randomness import generator

RNG = generator(0, "unused")


def test_two_bits_give_three_levels():
    sent = dm.defense("quantisation", bits=2).protect({"a": torch.tensor([-2.0, -0.9, 0.3, 1.1, 2.0])}, RNG)
    assert sent["a"].tolist() == [-2.0, 0.0, 0.0, 2.0, 2.0]


@settings(max_examples=30, deadline=None)
@given(bits=st.integers(2, 31), seed=st.integers(0, 1000))
def test_no_entry_moves_further_than_half_a_step(bits, seed):
    gradient = torch.randn(300, generator=generator(seed, "gradient"), dtype=torch.float64)
    defense = dm.defense("quantisation", bits=bits)
    sent = defense.protect({"a": gradient}, RNG)["a"]
    step = gradient.abs().max() / (2 ** (bits - 1) - 1)
    assert (sent - gradient).abs().max() <= step / 2 * (1 + 1e-9)
    assert len(sent.unique()) <= 2**bits - 1


def test_stochastic_rounding_is_right_on_average_and_stays_within_a_step():
    gradient = torch.tensor([1.0, 0.3, -0.45, 0.0], dtype=torch.float64).repeat(5000, 1)
    sent = dm.defense("quantisation", bits=2, stochastic=True).protect({"a": gradient}, generator(3, "rounding"))["a"]
    assert torch.allclose(sent.mean(0), gradient[0], atol=0.03)
    assert set(sent.unique().tolist()) == {-1.0, 0.0, 1.0}


@pytest.mark.parametrize("bits", [1, 33, 0])
def test_bits_outside_the_range_are_refused(bits):
    with pytest.raises(ValueError, match=rf"defense\.bits: expected an int from 2 to 32 .*, got {bits}"):
        dm.defense("quantisation", bits=bits)
