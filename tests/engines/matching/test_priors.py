"""Priors: their values by hand, their onset, and the refusal of a batch-norm prior without batch norm."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.features import FeatureMatch
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager
from dosimeter.engines.matching.priors import SquaredNorm, TotalVariation, batch_norm_prior
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate

IMAGE = torch.tensor([[[[0.0, 1.0], [3.0, 5.0]]]])


def test_total_variation_by_hand() -> None:
    assert float(TotalVariation(weight=1)(IMAGE, {})) == (3 + 4) / 2 + (1 + 2) / 2
    assert float(TotalVariation(weight=1, form="isotropic", power=2)(IMAGE, {})) == 9 + 1
    assert float(TotalVariation(weight=1, form="isotropic")(IMAGE, {})) == pytest.approx(10**0.5, rel=1e-5)
    assert float(TotalVariation(weight=1, form="isotropic", power=2, summed=True)(IMAGE.repeat(3, 2, 1, 1), {})) == 6 * (9 + 1)
    assert float(TotalVariation(weight=1, summed=True)(IMAGE, {})) == 3 + 4 + 1 + 2


def test_a_constant_image_and_a_flat_input_pay_no_variation() -> None:
    for form in ("l1", "isotropic"):
        prior = TotalVariation(weight=1, form=form)
        assert float(prior(torch.full((2, 3, 4, 4), 0.7), {})) == pytest.approx(0, abs=1e-3)
    assert float(TotalVariation(weight=1)(torch.rand(2, 7), {})) == 0


def test_squared_norm_is_the_mean_square() -> None:
    assert float(SquaredNorm(weight=1)(IMAGE, {})) == (1 + 9 + 25) / 4


def test_onset_switches_the_weight() -> None:
    prior = SquaredNorm(weight=0.3, onset=0.5)
    assert [prior.weight_at(progress) for progress in (0, 0.49, 0.5, 1)] == [0, 0, 0.3, 0.3]


def test_batch_norm_statistics_by_hand_through_the_model() -> None:
    model = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(4, 3)).eval()
    norm = model[0]
    assert isinstance(norm, nn.BatchNorm2d)
    norm.running_mean, norm.running_var = torch.tensor([1.0]), torch.tensor([2.0])
    exposure = dm.observe(model, dm.Batch(IMAGE / 5, torch.tensor([0])))
    prior = batch_norm_prior(model, weight=1.0, leading=(3.0, 5.0))
    recipe = Recipe(distance=SquaredError(), optimiser=Adam(), rate=Rate(start=1), steps=1, priors=(prior,))
    objective = Objective(exposure, recipe, torch.tensor([0]))
    terms = Terms(matching=torch.zeros(()), priors=torch.ones(1))
    found = Eager(objective)(IMAGE[None], None, objective.names, terms)
    mean, variance = IMAGE.mean(), IMAGE.var(correction=0)
    unit = (2 + norm.eps) ** 0.5
    assert float(found.objective) == pytest.approx(3 * (abs(float(mean) - 1) / unit + abs(float(variance) - 2) / unit**2))
    assert float(norm.running_mean) == 1.0
    printed = batch_norm_prior(model, weight=1.0, scaled=False)  # hfginv Eq. (11): in the units of the maps
    assert float(printed(IMAGE, {"0": IMAGE})) == pytest.approx(abs(float(mean) - 1) + abs(float(variance) - 2))


def test_batch_norm_statistics_weigh_the_same_in_any_units_of_the_maps() -> None:
    maps, totals = torch.rand(4, 3, 5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64), []
    for factor in (1.0, 255.0):
        norm = nn.BatchNorm2d(3, eps=1e-5 * factor**2).double()
        norm.running_mean, norm.running_var = 0.3 * factor * torch.ones(3).double(), 0.2 * factor**2 * torch.ones(3).double()
        prior = batch_norm_prior(nn.Sequential(norm), weight=1.0)
        totals.append(float(prior(maps, {"0": factor * maps})))
    assert totals[0] == pytest.approx(totals[1], rel=1e-10)


def test_a_model_without_batch_norm_is_refused() -> None:
    with pytest.raises(dm.Refused, match="the model has none; set batch_norm=0"):
        batch_norm_prior(nn.Linear(2, 2), weight=1.0)
    batch = dm.Batch(torch.rand(2, 4), torch.tensor([0, 1]))
    with pytest.raises(dm.Refused, match="batch-norm"):
        dm.reconstruct(dm.observe(nn.Linear(4, 3), batch), "gradinversion", labels=batch.targets, steps=1)


def test_features_are_matched_at_the_head_for_their_own_samples() -> None:
    received = torch.tensor([[1.0, 0.0], [2.0, 2.0], [5.0, 5.0]])
    prior = FeatureMatch(weight=1, head="head", features=torch.tensor([[2.0, 0.0]]), slots=torch.tensor([1]), distance=SquaredError())
    assert float(prior(received, {"head": received})) == 4.0
    assert prior.modules_to_watch(nn.Linear(1, 1)) == ("head",)
