"""The update's derivative by one sample, all directions at one time and one by one."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.training import FedAvg
from dosimeter.engines.bounds.mechanism import mechanism_of
from dosimeter.engines.bounds.pixel_prior import PixelProblem

TRAININGS = [FedAvg(steps=3, learning_rate=0.1), FedAvg(epochs=2, mini_batch=2, momentum=0.9), FedAvg(steps=2, max_norm=0.1)]


@pytest.mark.parametrize("training", TRAININGS)
def test_local_steps_are_pushed_forward_together_as_one_by_one(training):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))
    batch, auxiliary = dm.Batch(torch.rand(3, 6), torch.arange(3)), dm.Batch(torch.rand(20, 6), torch.zeros(20, dtype=torch.int64))
    defenses = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=0.05))
    jacobian = PixelProblem(mechanism_of(model, batch, auxiliary=auxiliary, training=training, defenses=defenses), "van_trees").jacobian
    points, directions = torch.rand(4, 6, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    assert not jacobian.separable
    together = jacobian.pushed(1, points, directions)
    assert jacobian.replayed
    jacobian.replayed = False
    one_by_one = jacobian.pushed(1, points, directions)
    assert torch.allclose(together, one_by_one, rtol=1e-10, atol=1e-12)
    jacobian.replayed = True
    assert torch.allclose(jacobian.columns(1, points[0], directions)[0], jacobian.pushed(1, points[:1], directions[:1])[0])
