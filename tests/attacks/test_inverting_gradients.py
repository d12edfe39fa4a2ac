"""Inverting Gradients: recovery above the nulls, the box, soft labels, FedAvg, withheld layers, refusals."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks import inverting_gradients
from dosimeter.engines.matching.solve import solve_problem


@pytest.fixture(scope="module")
def digits() -> dm.Batch:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    chosen = [3, 10, 25, 37]
    return dm.Batch(torch.tensor(bunch.images[chosen][:, None] / 16, dtype=torch.float32), torch.tensor(bunch.target[chosen]))


def small_net(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)
        )


def decibels(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float(-10 * (found - truth).square().mean().log10())


def test_one_image_comes_back_well_above_the_grey_image(digits: dm.Batch) -> None:
    one = dm.Batch(digits.inputs[:1], digits.targets[:1])
    exposure = dm.observe(small_net(), one)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=one.targets, steps=400, total_variation=1e-4)
    grey = decibels(one.inputs.mean().expand_as(one.inputs), one.inputs)
    assert decibels(found.inputs, one.inputs) > grey + 10
    assert found.distance is not None
    assert found.distance < 0.01
    assert found.objective > found.distance


def test_inputs_stay_in_the_data_range_that_the_normalisation_maps_pixels_to(digits: dm.Batch) -> None:
    normalization = dm.Normalization(mean=(0.5,), std=(0.25,))
    batch = dm.Batch((digits.inputs - 0.5) / 0.25, digits.targets)
    exposure = dm.observe(small_net(), batch, normalization=normalization)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=5)
    assert float(found.inputs.min()) == pytest.approx(-2.0)
    assert 1.9 < float(found.inputs.max()) <= 2.0
    free = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=5, boxed=False)
    assert float(free.inputs.abs().max()) > 2.0


def test_the_objective_is_the_cosine_distance_plus_total_variation(digits: dm.Batch) -> None:
    exposure = dm.observe(small_net(), digits)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=digits.targets, steps=20, total_variation=0.5)
    replayed = exposure.public.training(exposure.model, found.inputs, digits.targets, exposure.public.loss)
    ours = torch.cat([replayed[name].flatten() for name in exposure.update]).double()
    theirs = torch.cat([exposure.update[name].flatten() for name in exposure.update]).double()
    distance = 1 - float(ours @ theirs / (ours.norm() * theirs.norm()))
    image = found.inputs
    variation = float(image.diff(dim=2).abs().mean() + image.diff(dim=3).abs().mean())
    assert found.distance == pytest.approx(distance, rel=1e-4)
    assert found.objective == pytest.approx(distance + 0.5 * variation, rel=1e-4)


def test_without_a_weight_total_variation_is_measured_in_the_distance_at_the_start(digits: dm.Batch) -> None:
    exposure = dm.observe(small_net(), digits)
    start = dm.reconstruct(
        exposure, "inverting_gradients", labels=digits.targets, restarts=2, steps=1, learning_rate=1e-12, total_variation=0.0
    )
    assert start.distance is not None
    mean = sum(start.restarts) / 2  # without a prior the objective is the distance
    own, given = (
        dm.reconstruct(exposure, "inverting_gradients", labels=digits.targets, restarts=2, steps=20, total_variation=weight)
        for weight in (None, min(0.01, 0.1 * mean))
    )
    assert torch.allclose(own.inputs, given.inputs, atol=1e-5)
    assert own.objective == pytest.approx(given.objective, rel=1e-5)


def test_a_soft_label_estimate_is_used_as_it_is(digits: dm.Batch) -> None:
    soft = torch.full((4, 10), 0.05)
    soft[torch.arange(4), digits.targets] = 0.55
    exposure = dm.observe(small_net(), dm.Batch(digits.inputs, soft))
    right = dm.reconstruct(exposure, "inverting_gradients", labels=soft, steps=60)
    wrong = dm.reconstruct(exposure, "inverting_gradients", labels=digits.targets, steps=60)
    assert torch.equal(right.labels, soft)
    assert right.distance is not None
    assert wrong.distance is not None
    assert right.distance < wrong.distance


def test_withheld_layers_are_not_matched(digits: dm.Batch) -> None:
    exposure = dm.observe(small_net(), digits)
    head_only = dm.Exposure(
        model=exposure.model, update={k: v for k, v in exposure.update.items() if k.startswith("5")}, public=exposure.public
    )
    found = dm.reconstruct(head_only, "inverting_gradients", labels=digits.targets, steps=30)
    replayed = exposure.public.training(exposure.model, found.inputs, digits.targets, exposure.public.loss)
    ours = torch.cat([replayed[name].flatten() for name in head_only.update])
    theirs = torch.cat([head_only.update[name].flatten() for name in head_only.update])
    assert found.distance == pytest.approx(1 - float(torch.cosine_similarity(ours, theirs, dim=0)), abs=1e-5)


def test_local_steps_are_replayed(digits: dm.Batch) -> None:
    training = dm.FedAvg(steps=3, learning_rate=0.05)
    exposure = dm.observe(small_net(), digits, training=training)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=digits.targets, steps=30, total_variation=0.0)
    replayed = training(exposure.model, found.inputs, digits.targets, exposure.public.loss)
    ours = torch.cat([replayed[name].flatten() for name in exposure.update])
    theirs = torch.cat([exposure.update[name].flatten() for name in exposure.update])
    assert found.distance == pytest.approx(1 - float(torch.cosine_similarity(ours, theirs, dim=0)), abs=1e-5)


def test_labels_are_needed_and_must_be_as_many_as_the_batch(digits: dm.Batch) -> None:
    exposure = dm.observe(small_net(), digits)
    with pytest.raises(dm.Refused, match="needs labels"):
        dm.reconstruct(exposure, "inverting_gradients")
    with pytest.raises(dm.Refused, match="expected 4, one for each sample"):
        dm.reconstruct(exposure, "inverting_gradients", labels=digits.targets[:2])


@pytest.mark.parametrize(
    ("steps", "given", "taken"), [(3999, None, "signed"), (4000, None, "raw"), (4000, "signed", "signed"), (10, "soft", "soft")]
)
def test_short_runs_take_the_sign_and_long_ones_the_gradient_unless_it_is_said(monkeypatch, digits, steps, given, taken) -> None:
    seen = []

    def remember(problem, rng):
        seen.append(problem.recipe.optimiser.sign)
        return solve_problem(problem.under(replace(problem.recipe, steps=1)), rng)

    monkeypatch.setattr(inverting_gradients, "solve_problem", remember)
    dm.reconstruct(dm.observe(small_net(), digits), "inverting_gradients", labels=digits.targets, steps=steps, sign=given)
    assert seen == [taken]


def test_labels_that_move_begin_at_the_given_ones_or_at_noise_and_stay_a_distribution(digits):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Conv2d(1, 6, 3, padding=1), nn.Sigmoid(), nn.Flatten(), nn.Linear(384, 10)).eval()
    truth = dm.Batch(digits.inputs[:1], digits.targets[:1])
    exposure = dm.observe(model, truth)
    wrong = (truth.targets + 1) % 10
    fixed = dm.reconstruct(exposure, "inverting_gradients", labels=wrong, steps=300)
    moved, noise = (
        dm.reconstruct(exposure, "inverting_gradients", labels=wrong, steps=300, moving_labels=way) for way in ("from_labels", "from_noise")
    )
    for found in (moved, noise):
        assert float(found.labels.sum()) == pytest.approx(1.0, abs=1e-4)
        assert found.labels.argmax(1).equal(truth.targets)
        assert found.objective < fixed.objective
