"""Samples that share all their bins: settled exactly where linear algebra settles them, and not claimed where it does not."""

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.bins.inserted_layer import measure_moments
from dosimeter.engines.bins.shared import dependences, null_vectors, possible_places, separate_all, separate_shared_bins
from dosimeter.models.loading import load_model


def filled(places: torch.Tensor, bins: list[int], seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Contents of the occupied bins, their functional, and for each sample (n, F) what it adds and its rows among the occupied."""
    rng = torch.Generator().manual_seed(seed)
    added = torch.randn(len(places), 90, generator=rng, dtype=torch.float64)
    starts = torch.tensor([0, *bins]).cumsum(0)[:-1]
    contents = torch.zeros(sum(bins), 90, dtype=torch.float64)
    for column in (starts + places).T:
        contents.index_add_(0, column, added)
    occupied = torch.unique(starts + places)
    functional = torch.bucketize(occupied, starts, right=True) - 1
    return contents[occupied], functional, added, torch.searchsorted(occupied, starts + places)


@pytest.mark.parametrize("seed", range(5))
def test_samples_of_which_none_lies_alone_come_apart(seed) -> None:
    places = torch.stack(
        [torch.arange(48)[torch.randperm(48, generator=torch.Generator().manual_seed(seed + k))] % 16 for k in range(4)], 1
    )
    contents, functional, added, rows = filled(places, [16] * 4, seed)  # three samples in every bin
    found, where = separate_shared_bins(contents, functional, 1e-10)
    assert len(found) >= 24
    for content, place in zip(found, where):
        sample = int((rows == place).all(1).nonzero()[0])
        assert torch.allclose(content, added[sample], atol=1e-8)


def test_two_samples_with_all_bins_in_common_are_one_to_the_equations() -> None:
    places = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 1, 2], [1, 2, 3]])
    contents, functional, added, rows = filled(places, [4, 4, 4], 3)
    found, where = separate_shared_bins(contents, functional, 1e-10)
    same = (where == rows[0]).all(1).nonzero().flatten()
    assert len(same) == 1
    assert torch.allclose(found[same[0]], added[0] + added[1])


@pytest.mark.parametrize("noise", [0.0, 1e-4])
def test_as_many_choices_as_samples_show_all_samples_whatever_they_weigh(noise) -> None:
    places = torch.tensor([[0, 1, 2], [1, 1, 0], [2, 0, 1], [0, 2, 0]])
    contents, functional, added, rows = filled(places, [3, 3, 3], 5)
    contents = contents + noise * torch.randn(contents.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    rank, null = dependences(contents, 1e-10, 2 * noise * contents.numel() ** 0.5, 4)
    assert rank == 4
    found = separate_all(contents, functional, null, 4)
    assert found is not None
    for content, place in zip(*found):
        sample = int((rows == place).all(1).nonzero()[0])
        assert torch.allclose(content, added[sample], atol=1e-8 + 10 * noise)
    assert separate_all(contents, functional, null, 3) is None


def test_noise_is_no_sample_and_samples_that_share_all_bins_are_one_direction() -> None:
    places = torch.tensor([[0, 0, 0], [0, 0, 0], [1, 1, 1], [2, 1, 2]])
    contents, functional, _, _ = filled(places, [3, 3, 3], 3)
    contents = contents + 1e-4 * torch.randn(contents.shape, generator=torch.Generator().manual_seed(6), dtype=torch.float64)
    assert dependences(contents, 1e-10, 0.0, 4)[0] > 4
    rank, null = dependences(contents, 1e-10, 2e-4 * contents.numel() ** 0.5, 4)
    assert (rank, null.shape[1]) == (3, 0)
    assert separate_all(contents, functional, null, 4) is None


@pytest.mark.parametrize("functionals", [1, 2])
def test_nothing_is_settled_where_there_are_more_samples_than_bins(functionals) -> None:
    places = torch.randint(5, (30, functionals), generator=torch.Generator().manual_seed(1))
    contents, functional, _, _ = filled(places, [5] * functionals, 1)
    assert len(separate_shared_bins(contents, functional, 1e-10)[0]) == 0


@pytest.mark.parametrize("on_levels", [True, False])
@pytest.mark.parametrize("twins", [True, False])
def test_a_filter_with_hardly_more_bins_than_targets_shows_nearly_all_and_no_mixture(on_levels, twins) -> None:
    rng = torch.Generator().manual_seed(8)
    coarse = torch.rand(60, 3, 5, 5, generator=rng)
    inputs = torch.nn.functional.interpolate(coarse, (16, 16), mode="bilinear")
    inputs = (inputs * 255).round() / 255 if on_levels else inputs
    if twins:  # two samples so alike that all their bins are the same
        inputs[1] = inputs[0]
        inputs[1, 0, 0, 0] += 1 / 255
    batch = dm.Batch(inputs, torch.full((60,), 3))
    model = load_model("small_cnn", {"size": 16, "width": 4}, None, 3)
    moments = measure_moments(inputs, dm.Normalization())  # as an earlier round shows them
    attack = dm.attack("gradfilt_imprint", targets=(3,), expected=60, bins=80, input_shape=(3, 16, 16), moments=moments)
    found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
    error = torch.cdist(found.inputs.double().flatten(1), inputs.double().flatten(1)).min(1).values / 768**0.5
    assert float(error.max()) < 1e-2
    assert len(found.inputs) >= (40 if twins else 50)


def test_only_the_bins_of_one_sample_are_possible_places():
    """Three samples in two functionals of two and three bins: A marks their bins, and N A = 0."""
    rng = torch.Generator().manual_seed(2)
    places = torch.tensor([[0, 2], [0, 3], [1, 4]])
    marks = torch.zeros(5, 3, dtype=torch.float64).scatter_(0, places.T, 1.0)
    null = null_vectors(marks @ torch.rand(3, 20, generator=rng, dtype=torch.float64), 1e-9)
    assert null.shape == (5, 2)
    assert possible_places(null, places).all()
    assert not possible_places(null, torch.tensor([[1, 2], [1, 3], [0, 4]])).any()
    assert not possible_places(null[:, :0], places).any()  # without dependences nothing is shown
