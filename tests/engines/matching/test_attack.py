"""An attack's objective at other inputs."""

import pytest
import torch
from torch import Generator, nn

import dosimeter as dm


def test_the_objective_at_the_reconstruction_is_the_attacks_own_and_lower_at_the_truth(exposed) -> None:
    exposure, labels = exposed
    attack = dm.attack("dlg", steps=20, restarts=1)
    found = dm.reconstruct(exposure, attack, labels=labels)
    assert attack.objective(exposure, found, found.inputs, found.labels) == pytest.approx(found.objective, rel=1e-9)
    truth = torch.rand(2, 1, 6, 6, generator=Generator().manual_seed(0)).double()
    itself = dm.observe(exposure.model, dm.Batch(truth, labels.labels))
    assert attack.objective(itself, found, truth, labels.labels) == pytest.approx(0.0, abs=1e-20)


def test_a_model_that_draws_random_numbers_has_one_objective() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 5)).train()
        batch = dm.Batch(torch.rand(2, 1, 4, 4), torch.tensor([1, 4]))
        exposure = dm.observe(model, batch)
    attack = dm.attack("inverting_gradients", steps=2)
    found = dm.reconstruct(exposure, attack, labels=batch.targets)
    first, second = (attack.objective(exposure, found, batch.inputs, batch.targets) for _ in range(2))
    assert first == second


def test_an_attack_that_minimises_nothing_has_no_objective(classifier, digits) -> None:
    images, labels = digits
    attack = dm.attack("imprint", bins=50, input_shape=(1, 8, 8))
    exposure = dm.observe(attack.tamper(classifier), dm.Batch(images[:2], labels[:2]))
    found = dm.reconstruct(exposure, attack)
    assert attack.objective(exposure, found, images[:2], labels[:2]) is None
