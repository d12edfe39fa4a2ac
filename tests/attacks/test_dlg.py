"""DLG: exact recovery of one digit, labels included; its refusals; its reproducibility."""

import pytest
import torch
from torch import nn

import dosimeter as dm


@pytest.fixture(scope="module")
def digit() -> dm.Batch:
    from sklearn.datasets import load_digits

    digits = load_digits()
    return dm.Batch(torch.tensor(digits.images[17:18, None] / 16, dtype=torch.float32), torch.tensor(digits.target[17:18]))


def sigmoid_net(seed: int) -> nn.Module:
    """DLG's kind of network: sigmoid convolutions, weights U(−.5, .5), 8×8 inputs."""
    model = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.Sigmoid(), nn.Conv2d(8, 8, 5, padding=2, stride=2), nn.Sigmoid(), nn.Flatten(), nn.Linear(128, 10)
    )
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.rand(parameter.shape, generator=rng) - 0.5)
    return model


def mean_squared_error(found: dm.Reconstruction, batch: dm.Batch) -> float:
    return float((found.inputs - batch.inputs).square().mean())


def test_one_image_and_its_label_come_back(digit: dm.Batch) -> None:
    exposure = dm.observe(sigmoid_net(0), digit)
    found = dm.reconstruct(exposure, "dlg", steps=300, restarts=4)
    assert mean_squared_error(found, digit) < 1e-3  # 30 dB
    assert found.labels.shape == (1, 10)
    assert int(found.labels.argmax()) == int(digit.targets)
    assert found.objective == min(found.restarts) == found.distance


def test_the_chosen_restart_is_the_one_with_the_lowest_objective_not_the_first(digit: dm.Batch) -> None:
    exposure = dm.observe(sigmoid_net(1), digit)
    found = dm.reconstruct(exposure, "dlg", steps=15, restarts=3)
    replayed = exposure.public.training(exposure.model, found.inputs, found.labels, exposure.public.loss)
    distance = sum(float((replayed[name] - exposure.update[name]).square().sum()) for name in exposure.update)
    assert distance == pytest.approx(min(found.restarts), rel=1e-3)


def test_given_labels_stay_fixed_and_joint_labels_start_from_them(digit: dm.Batch) -> None:
    exposure = dm.observe(sigmoid_net(0), digit)
    fixed = dm.reconstruct(exposure, "dlg", labels=digit.targets, steps=20, restarts=1)
    assert torch.equal(fixed.labels, digit.targets)
    joint = dm.reconstruct(exposure, "dlg", labels=digit.targets, joint_labels=True, steps=1, restarts=1)
    assert int(joint.labels.argmax()) == int(digit.targets)


def test_same_seed_same_bits_and_the_model_is_left_alone(digit: dm.Batch) -> None:
    exposure = dm.observe(sigmoid_net(2), digit)
    before = {name: tensor.clone() for name, tensor in exposure.model.state_dict().items()}
    first, second = (dm.reconstruct(exposure, "dlg", steps=30, restarts=2, seed=5) for _ in range(2))
    assert torch.equal(first.inputs, second.inputs)
    assert first.restarts == second.restarts
    assert all(torch.equal(before[name], tensor) for name, tensor in exposure.model.state_dict().items())


def test_an_undeclared_batch_size_is_refused_without_labels_and_taken_from_them(digit: dm.Batch) -> None:
    exposure = dm.observe(sigmoid_net(0), digit, declare_batch_size=False)
    with pytest.raises(dm.Refused, match="batch size is unknown"):
        dm.reconstruct(exposure, "dlg", steps=1)
    assert len(dm.reconstruct(exposure, "dlg", labels=digit.targets, steps=1).inputs) == 1


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match=r"attack\.steps: expected a positive int, got -3"):
        dm.attack("dlg", steps=-3)
