"""What holds an update back: proofs, and nothing where there are none."""

import torch
from torch import nn

import dosimeter as dm
from dosimeter.integrations.gates import proved


def _exposure(**options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 20))
    return dm.observe(model, dm.Batch(torch.rand(3, 1, 8, 8), torch.tensor([4, 7, 11])), **options)


def test_a_plain_gradient_proves_labels_and_features():
    reason = proved(_exposure())
    assert "its labels" in reason
    assert "features of 3 samples" in reason


def test_behind_much_noise_nothing_is_proved():
    assert proved(_exposure(defenses=(dm.defense("gaussian_noise", std=1.0),))) == ""
