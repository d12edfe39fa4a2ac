import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator

UPDATE = {"weight": torch.linspace(-2, 2, 40_000).view(200, 200), "bias": torch.full((10_000,), -0.0)}


def test_noise_has_the_stated_standard_deviation_and_no_mean():
    sent = dm.defense("gaussian_noise", std=0.3).protect(UPDATE, generator(1, "noise"))
    for name, change in UPDATE.items():
        noise = sent[name] - change
        assert noise.std().item() == pytest.approx(0.3, rel=0.03)
        assert abs(noise.mean().item()) < 5 * 0.3 / noise.numel() ** 0.5


def test_relative_noise_scales_with_each_layer_maximum():
    update = {"small": torch.full((20_000,), 1e-3), "large": torch.full((20_000,), -5.0)}
    sent = dm.defense("gaussian_noise", std=0.1, relative=True).protect(update, generator(2, "noise"))
    assert (sent["small"] - update["small"]).std().item() == pytest.approx(1e-4, rel=0.03)
    assert (sent["large"] - update["large"]).std().item() == pytest.approx(0.5, rel=0.03)


def test_noise_depends_on_the_given_generator_alone():
    defense = dm.defense("gaussian_noise", std=1.0)
    first = defense.protect(UPDATE, generator(3, "noise"))
    torch.manual_seed(99)
    second = defense.protect(UPDATE, generator(3, "noise"))
    other = defense.protect(UPDATE, generator(4, "noise"))
    assert torch.equal(first["weight"], second["weight"])
    assert not torch.equal(first["weight"], other["weight"])


def test_noise_of_layers_is_independent():
    update = {"first": torch.zeros(10_000), "second": torch.zeros(10_000)}
    sent = dm.defense("gaussian_noise", std=1.0).protect(update, generator(5, "noise"))
    correlation = torch.corrcoef(torch.stack([sent["first"], sent["second"]]))[0, 1]
    assert abs(correlation.item()) < 0.05


def test_a_negative_deviation_is_refused():
    with pytest.raises(ValueError, match=r"defense\.std: expected a finite number of at least 0"):
        dm.defense("gaussian_noise", std=-1.0)


def test_noise_beyond_the_numbers_is_blamed_on_the_defense(classifier, batch):
    with pytest.raises(dm.Refused, match=r"beyond what torch\.float32 can hold"):
        dm.observe(classifier, batch, defenses=(dm.defense("gaussian_noise", std=1e308),))
