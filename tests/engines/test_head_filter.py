"""The filter in the last layer: planted and found again, counts restored, and gradients calibrated to the targets' own."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.head_filter import BIAS, find_filter, plant_filter


@pytest.fixture
def crowd(digits) -> dm.Batch:
    images, labels = digits
    return dm.Batch(images[300:340].clone(), labels[300:340].clone())


def test_the_filter_is_found_where_it_was_planted(classifier, batch) -> None:
    rigged = plant_filter(classifier, "5", (1, 7), bias=BIAS, scale=2.0, camouflage=0.0, rng=torch.Generator().manual_seed(0))
    targets = torch.tensor([1, 7])
    others = torch.tensor([0, 2, 3, 4, 5, 6, 8, 9])
    assert torch.equal(rigged[5].weight[targets], 2 * classifier[5].weight[targets])
    assert not rigged[5].weight[others].any()
    assert rigged[5].bias[others].tolist() == [BIAS] * 8
    found = find_filter(dm.observe(rigged, batch))
    assert found.targets.tolist() == [1, 7]
    assert found.probabilities.tolist() == [0.125 * (k not in (1, 7)) for k in range(10)]
    with pytest.raises(dm.Refused, match="bears its filter"):
        find_filter(dm.observe(classifier, batch))


@pytest.mark.parametrize("targets", [(), (3, 3), (10,), tuple(range(10))])
def test_targets_that_are_no_part_of_the_classes_are_refused(classifier, targets) -> None:
    with pytest.raises(ValueError, match=r"attack\.targets"):
        plant_filter(classifier, "5", targets, bias=BIAS, scale=1.0, camouflage=0.0, rng=torch.Generator())


def relative_error(found: dm.Exposure, wanted: dm.Exposure, names) -> float:
    difference = sum(float((found.update[name] - wanted.update[name]).double().square().sum()) for name in names)
    return (difference / sum(float(wanted.update[name].double().square().sum()) for name in names)) ** 0.5


def of_classes(batch: dm.Batch, classes) -> dm.Batch:
    chosen = torch.isin(batch.targets, torch.tensor(classes))
    return dm.Batch(batch.inputs[chosen], batch.targets[chosen])


@pytest.mark.parametrize("hidden", ["soft labels", "rounding"])
def test_counts_that_are_no_whole_numbers_are_said_to_be_none(hidden, classifier, crowd) -> None:
    rigged = dm.attack("gradfilt", targets=(3,)).tamper(classifier)
    soft = dm.Batch(crowd.inputs, torch.linspace(0.5, 1.5, 10).expand(len(crowd.inputs), 10) / 10)
    small = dm.FedAvg(learning_rate=1e-4, steps=1)
    exposure = dm.observe(rigged, soft) if hidden == "soft labels" else dm.observe(rigged, crowd, training=small)
    estimate = dm.recover_labels(exposure, "gradfilt")
    assert estimate.outcome is dm.Outcome.AMBIGUOUS
    assert "no whole numbers" in estimate.message
    if hidden == "soft labels":
        assert torch.allclose(estimate.scores, soft.targets.double().sum(0), atol=1e-3)


def test_a_clipped_update_is_stretched_back(classifier, crowd) -> None:
    attack = dm.attack("gradfilt", targets=(2, 5))
    rigged = attack.tamper(classifier)
    few = dm.Batch(crowd.inputs[:9], crowd.targets[:9])
    clipped = dm.observe(rigged, few, defenses=[dm.defense("clipping", max_norm=0.01)])
    estimate = dm.recover_labels(clipped, "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(few.targets, minlength=10))
    assert "times a gradient, as clipping makes it" in estimate.message
    own = dm.observe(rigged, of_classes(few, (2, 5)))
    assert relative_error(attack.calibrate(clipped)[0], own, list(own.update)) < 1e-4


def test_a_scale_that_overcomes_the_bias_is_refused(classifier) -> None:
    with pytest.raises(ValueError, match=r"attack\.scale"):
        dm.attack("gradfilt", targets=(3,), scale=1e30).tamper(classifier)


def test_a_guessed_batch_size_has_no_confidence(classifier, digits) -> None:
    images, labels = digits
    rigged = dm.attack("gradfilt", targets=(2,)).tamper(classifier)
    exposure = dm.observe(rigged, dm.Batch(images[:4], labels[:4]), declare_batch_size=False)
    astray = torch.linspace(-1, 1, 10) / 37  # adds up to zero, and is no multiple of one over any size
    exposure = replace(exposure, update={**exposure.update, "5.bias": exposure.update["5.bias"] + astray})
    estimate = dm.recover_labels(exposure, "gradfilt")
    assert "its least and a guess" in estimate.message
    assert estimate.confidence is None
    assert estimate.outcome is not dm.Outcome.COMPLETED


@pytest.mark.parametrize("targets", [(3,), (0, 3, 8)])
@pytest.mark.parametrize("loss", [dm.CrossEntropy(), dm.Focal(gamma=1.0)])
def test_calibrated_gradients_are_the_target_samples_own(targets, loss, classifier, crowd) -> None:
    attack = dm.attack("gradfilt", targets=targets)
    rigged = attack.tamper(classifier)
    calibrated, labels = attack.calibrate(dm.observe(rigged, crowd, loss=loss))
    own = dm.observe(rigged, of_classes(crowd, targets), loss=loss)
    assert torch.equal(labels.labels, of_classes(crowd, targets).targets.sort().values)
    assert relative_error(calibrated, own, [name for name in own.update if not name.startswith("5.")]) < 1e-5
    assert relative_error(calibrated, own, ["5.weight", "5.bias"]) < 1e-5
    assert calibrated.public.batch_size == own.public.batch_size


def test_no_probability_is_left_to_the_targets_in_single_precision(classifier, crowd) -> None:
    rigged = dm.attack("gradfilt", targets=(4,), scale=50.0).tamper(classifier)
    with torch.no_grad():
        p = rigged(crowd.inputs).softmax(1)
    assert float(p[:, 4].max()) == 0.0
    assert torch.allclose(p[:, 0], torch.full((len(p),), 1 / 9))
    exposure = dm.observe(rigged, crowd)
    assert all(torch.isfinite(change).all() for change in exposure.update.values())


def test_secure_aggregation_hides_whose_but_not_what(classifier, crowd) -> None:
    attack = dm.attack("gradfilt", targets=(3,))
    rigged = attack.tamper(classifier)
    aggregated = dm.observe(rigged, crowd, defenses=(dm.defense("secure_aggregation", clients=4),))
    estimate = dm.recover_labels(aggregated, "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(crowd.targets, minlength=10))
    calibrated, _ = attack.calibrate(aggregated)
    own = dm.observe(rigged, of_classes(crowd, (3,)))
    assert relative_error(calibrated, own, ["0.weight", "3.weight"]) < 1e-5


def test_counts_read_off_signs_are_said_to_be_open(classifier, crowd) -> None:
    rigged = dm.attack("gradfilt", targets=(3,)).tamper(classifier)
    estimate = dm.recover_labels(dm.observe(rigged, crowd, defenses=["sign"]), "gradfilt")
    assert estimate.outcome is dm.Outcome.AMBIGUOUS
    assert "does not add up to zero" in estimate.message
    assert dm.recover_labels(dm.observe(rigged, crowd), "gradfilt").outcome is dm.Outcome.COMPLETED


def test_a_head_whose_weights_are_computed_is_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 10)))
    with pytest.raises(dm.Refused, match="computed from others"):
        dm.attack("gradfilt", targets=(0,), input_shape=(1, 8, 8)).tamper(model)
