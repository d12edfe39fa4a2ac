"""The share that several inputs have in common: found among labels, believed only where chance does not give it."""

import torch

from dosimeter.engines.recursion.common_share import find_share
from dosimeter.engines.recursion.own_gradients import Share


def shares(*values: float, luck: float = 2.0, spread: float = 2e-5) -> list[Share]:
    return [Share(value=value, spread=spread, luck=luck) for value in values]


def test_the_common_share_is_found_among_those_of_wrong_labels() -> None:
    found = find_share([shares(0.11, 0.3), shares(0.3 * (1 + 1e-5), 0.7), shares(0.05, 0.3)], 0.5, whole=False)
    assert found is not None
    assert abs(found.value / 0.3 - 1) < 3e-5


def test_one_input_of_two_classes_shows_no_share() -> None:
    assert find_share([shares(0.3, 0.4)], 0.5, whole=False) is None
    assert find_share([], 0.5, whole=False) is None


def test_an_input_whose_direction_fits_shows_the_share_by_itself() -> None:
    found = find_share([shares(0.3, luck=1e-5), shares(0.1)], 0.5, whole=False)
    assert found is not None
    assert found.value == 0.3


def test_no_share_exceeds_the_largest() -> None:
    assert find_share([shares(0.6), shares(0.6), shares(0.6)], 0.5, whole=False) is None


def test_an_undeclared_size_is_a_whole_number() -> None:
    found = find_share([shares(1 / 3), shares((1 - 1e-5) / 3)], 1.0, whole=True)
    assert found is not None
    assert found.value == 1 / 3
    assert find_share([shares(0.3), shares(0.3), shares(0.3)], 1.0, whole=True) is None


def test_random_shares_have_none_in_common() -> None:
    """Law: among mixtures, whose shares are random, a common share is believed hardly ever."""
    rng = torch.Generator().manual_seed(0)
    wrong = 0
    for _ in range(2000):
        drawn = torch.rand(8, 2, generator=rng).tolist()
        wrong += find_share([shares(*pair) for pair in drawn], 1.0, whole=False) is not None
    assert wrong <= 2
