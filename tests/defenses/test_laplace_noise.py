import pytest
import torch
from scipy import stats

import dosimeter as dm
from dosimeter.randomness import generator


def test_noise_follows_the_laplace_distribution():
    sent = dm.defense("laplace_noise", scale=0.2).protect({"a": torch.zeros(20_000, dtype=torch.float64)}, generator(11, "noise"))
    assert stats.kstest(sent["a"].numpy(), stats.laplace(scale=0.2).cdf).pvalue > 1e-3
    assert sent["a"].std().item() == pytest.approx(0.2 * 2**0.5, rel=0.05)


def test_relative_noise_scales_with_each_layer_maximum():
    update = {"small": torch.full((20_000,), 1e-3), "large": torch.full((20_000,), -5.0)}
    sent = dm.defense("laplace_noise", scale=0.1, relative=True).protect(update, generator(12, "noise"))
    assert (sent["small"] - 1e-3).abs().mean().item() == pytest.approx(1e-4, rel=0.05)
    assert (sent["large"] + 5.0).abs().mean().item() == pytest.approx(0.5, rel=0.05)


def test_a_negative_scale_is_refused():
    with pytest.raises(ValueError, match=r"defense\.scale: expected a finite number of at least 0"):
        dm.defense("laplace_noise", scale=-0.1)


def test_noise_beyond_the_numbers_is_blamed_on_the_defense(classifier, batch):
    with pytest.raises(dm.Refused, match=r"beyond what torch\.float32 can hold"):
        dm.observe(classifier, batch, defenses=(dm.defense("laplace_noise", scale=1e308),))
