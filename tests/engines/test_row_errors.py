"""What defenses and rounding may have added to a row: none, a known size, or anything."""

import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.row_errors import quotients_keep_their_scale, row_errors


def errors(**options):
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3))
    with torch.no_grad():
        model[1].weight.fill_(0.5)
    exposure = dm.observe(model, dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1])), **options)
    change = exposure.update["1.weight"]
    return row_errors(change, exposure.model[1].weight, exposure.public), change


def test_a_plain_gradient_has_none():
    found, _ = errors()
    assert found.norms.tolist() == found.entries.tolist() == [0.0] * 6


def test_noise_adds_up_over_a_row():
    found, _ = errors(defenses=[dm.defense("gaussian_noise", std=0.01)])
    assert found.norms.tolist() == pytest.approx([0.01 * 4] * 6)
    assert found.entries.tolist() == pytest.approx([0.06] * 6)


def test_quantisation_moves_an_entry_by_half_a_step():
    found, change = errors(defenses=[dm.defense("quantisation", bits=6)])
    assert float(found.entries.max()) == pytest.approx(float(change.abs().max()) / 31 / 2, rel=1e-3)


def test_a_difference_of_weights_is_rounded_as_the_weights_are():
    found, _ = errors(training=dm.FedAvg(learning_rate=0.1))
    expected = torch.finfo(torch.float32).eps * 0.5 / math.sqrt(12) / 0.1 * math.sqrt(16)
    assert found.norms.tolist() == pytest.approx([expected] * 6)


def test_an_undeclared_distortion_may_have_added_anything():
    found, _ = errors(defenses=[dm.defense("sign")])
    assert all(math.isinf(value) for value in found.norms.tolist())


def test_clipping_each_layer_by_itself_loses_the_scale_of_quotients():
    batch = dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([0, 1]))
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 3))
    for mode, bound, kept in (("norm", 0.1, True), ("layer", 0.1, False), ("layer", 100.0, True)):
        exposure = dm.observe(model, batch, defenses=[dm.defense("clipping", max_norm=bound, mode=mode)])
        assert quotients_keep_their_scale(exposure.public, exposure.update, ["1.weight", "1.bias"]) is kept
