"""What features look like before any gradient is seen."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.subspace.feature_prior import find_feature_prior, fit_feature_prior
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of


def exposed(auxiliary=None, shape=(3, 8, 8)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 40), nn.ReLU(), nn.Linear(40, 10))
    return dm.observe(model, dm.Batch(torch.rand(4, *shape), torch.arange(4)), auxiliary=auxiliary)


def known(exposure):
    found = find_feature_prior(exposure, find_head(exposure))
    assert found is not None
    return found


@pytest.mark.parametrize(("middle", "deviation"), [(0.0, 1.0), (0.5, 2.0), (-0.7, 0.5)])
def test_rectified_gaussians_are_told_by_their_zeros_and_their_mean(middle, deviation):
    values = middle + deviation * torch.randn(2000, 50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    found = fit_feature_prior(values.clamp_min(0), non_negative=True)
    assert float((found.gain * found.mean).mean()) == pytest.approx(middle, abs=0.02)
    assert float((found.spread.sqrt() * found.size).mean()) == pytest.approx(deviation, rel=0.02)


def test_features_without_zeros_are_described_by_mean_and_variance():
    values = 3 + torch.randn(4000, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = fit_feature_prior(values, non_negative=False)
    torch.testing.assert_close(found.mean, torch.full_like(found.mean, 3.0), rtol=0, atol=0.1)
    assert float(found.gain) == 1
    assert float((found.spread * found.size.square()).mean()) == pytest.approx(1, rel=0.05)


def test_dead_features_are_not_taken_for_impossible():
    found = fit_feature_prior(torch.zeros(5, 3, dtype=torch.float64), non_negative=True)
    assert bool((found.size > 0).all())
    values = torch.ones(5, 3, dtype=torch.float64)
    values[:, 0] = 0
    assert float(fit_feature_prior(values, non_negative=True).size[0]) > 0.3


def test_auxiliary_samples_are_used_where_they_are_granted():
    auxiliary = dm.Batch(torch.rand(30, 3, 8, 8), torch.zeros(30, dtype=torch.long))
    exposure = exposed(auxiliary)
    head = find_head(exposure)
    expected = input_of(exposure.model, head.name, auxiliary.inputs).double().mean(0)
    torch.testing.assert_close(known(exposure).mean, expected)


def test_synthetic_images_come_close_to_auxiliary_ones():
    exposure = exposed()
    head = find_head(exposure)
    smooth = torch.rand(200, 3, 1, 1).expand(-1, -1, 8, 8) * 0.5 + 0.25  # images of one colour each
    truth = input_of(exposure.model, head.name, smooth).double().mean(0)
    assert float(torch.cosine_similarity(known(exposure).mean, truth, dim=0)) > 0.9


def test_what_no_input_shows_is_not_to_be_expected():
    exposure = exposed()
    found = known(exposure)
    shares = found.share(input_of(exposure.model, find_head(exposure).name, torch.rand(50, 3, 8, 8)).double())
    assert 0 < found.least < float(shares.min())
    assert float(shares.max()) < found.most < 10
    assert float(found.share(3 * found.mean[None])) == pytest.approx(3)


def test_nothing_is_known_of_inputs_that_are_the_features():
    exposure = dm.observe(nn.Linear(20, 10), dm.Batch(torch.rand(4, 20), torch.arange(4)))
    assert find_feature_prior(exposure, find_head(exposure)) is None


def test_inputs_that_are_not_images_get_white_noise():
    exposure = exposed(shape=(192,))
    assert bool(torch.isfinite(known(exposure).mean).all())
