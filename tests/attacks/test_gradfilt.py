"""GradFilt: exact labels and calibrated gradients, reconstruction by matching, aggregation, refusals."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.gradfilt import FadingVariation
from dosimeter.models.loading import load_model


@pytest.fixture
def crowd(digits) -> dm.Batch:
    images, labels = digits
    return dm.Batch(images[300:340].clone(), labels[300:340].clone())


@pytest.mark.parametrize("name", ["fcn3", "lenet5", "small_cnn", "resnet20", "vgg11"])
@pytest.mark.parametrize("classes", [10, 1000])
def test_labels_are_exact_on_any_architecture(name, classes) -> None:
    options = {"fcn3": {"hidden": (32, 16)}, "vgg11": {"hidden": 16}, "small_cnn": {"width": 4}}.get(name, {})
    model = load_model(name, {**options, "classes": classes}, None, 7)
    rng = torch.Generator().manual_seed(8)
    batch = dm.Batch(torch.rand(24, 3, 32, 32, generator=rng), torch.randint(classes, (24,), generator=rng))
    rigged = dm.attack("gradfilt", targets=(3,)).tamper(model)
    estimate = dm.recover_labels(dm.observe(rigged, batch), "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(batch.targets, minlength=classes))
    assert estimate.confidence == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("loss", [dm.CrossEntropy(smoothing=0.2), dm.CrossEntropy(temperature=2.0), dm.Focal(gamma=2.0)])
def test_labels_are_exact_under_other_softmax_losses(loss, classifier, crowd) -> None:
    rigged = dm.attack("gradfilt", targets=(1, 7)).tamper(classifier)
    estimate = dm.recover_labels(dm.observe(rigged, crowd, loss=loss), "gradfilt", targets=(7, 1))
    assert torch.equal(estimate.counts, torch.bincount(crowd.targets, minlength=10))


def test_an_undeclared_batch_size_is_inferred(classifier, crowd) -> None:
    rigged = dm.attack("gradfilt", targets=(2,)).tamper(classifier)
    estimate = dm.recover_labels(dm.observe(rigged, crowd, declare_batch_size=False), "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(crowd.targets, minlength=10))


def test_counts_that_noise_hides_are_doubted_in_the_reconstruction_too(classifier, crowd) -> None:
    attack = dm.attack("gradfilt", targets=(3,), steps=5)
    noisy = dm.observe(attack.tamper(classifier), crowd, defenses=[dm.defense("gaussian_noise", std=1.0)])
    found = dm.reconstruct(noisy, attack)
    assert found.outcome is dm.Outcome.AMBIGUOUS
    assert "no whole numbers" in found.message


def test_a_bias_that_shuts_out_nothing_and_inputs_that_do_not_fit_are_refused(classifier) -> None:
    with pytest.raises(ValueError, match=r"attack\.bias: expected"):
        dm.attack("gradfilt", targets=(3,), bias=1.0).tamper(classifier)
    with pytest.raises(ValueError, match=r"attack\.input_shape"):
        dm.attack("gradfilt", targets=(3,), input_shape=(1, 9, 9)).tamper(classifier)
    with pytest.raises(ValueError, match=r"attack\.bins"):
        dm.attack("imprint", bins=10**12).tamper(classifier)


def test_a_given_total_variation_is_taken_where_features_are_matched(digits, convolutions) -> None:
    images, labels = digits
    batch = dm.Batch(images[:3], labels[:3])
    roughness = []
    for weight in (0.0, 1.0):
        attack = dm.attack("gradfilt", targets=(int(labels[0]),), steps=60, total_variation=weight)
        found = dm.reconstruct(dm.observe(attack.tamper(convolutions), batch), attack).inputs
        roughness.append(float((found[..., 1:] - found[..., :-1]).abs().mean()))
    assert roughness[1] < 0.5 * roughness[0]


def test_samples_of_different_classes_are_polished_to_the_last_digit(digits) -> None:
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(5)
        stem = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.Tanh(), nn.Conv2d(16, 16, 3, padding=1, stride=2), nn.Tanh())
        model = nn.Sequential(*stem, nn.Conv2d(16, 3, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(48, 10))
    rows = torch.cat([(labels == label).nonzero().flatten()[3:4] for label in (1, 4, 6, 7, 8)])
    batch, truth = dm.Batch(images[rows], labels[rows]), dm.Batch(images[rows[:2]], labels[rows[:2]])
    worst = {}
    for matched in (None, "update"):
        attack = dm.attack("gradfilt", targets=(1, 4), steps=300, matched=matched)
        found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
        worst[matched] = float(dm.score(found, truth, metrics=["psnr"])["psnr"].min())
        assert ("polished by least squares" in found.message) == (matched is None)
    assert worst[None] > 80
    assert worst["update"] < 45


def test_matching_the_filtered_gradient_beats_matching_the_batch(digits, classifier) -> None:
    images, labels = digits
    one = int((labels[50:] == 6).nonzero()[0]) + 50
    others = (labels != 6).nonzero().flatten()[40:43]
    batch = dm.Batch(images[[one, *others.tolist()]], labels[[one, *others.tolist()]])
    attack = dm.attack("gradfilt", targets=(6,), steps=300, total_variation=1e-4)
    found = dm.reconstruct(dm.observe(attack.tamper(classifier), batch), attack)
    whole = dm.reconstruct(dm.observe(classifier, batch), "inverting_gradients", labels=batch.targets, steps=300, total_variation=1e-4)
    error = float((found.inputs[0] - batch.inputs[0]).square().mean())
    plain = float((whole.inputs - batch.inputs[0]).square().flatten(1).mean(1).min())
    assert found.inputs.shape == (1, 1, 8, 8)
    assert found.labels.tolist() == [6]
    assert error < 0.5 * plain


@pytest.fixture
def convolutions() -> nn.Module:
    """A network whose features, 16 maps of the input's size, have more numbers than an input."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        first, second = nn.Conv2d(1, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.Flatten(), nn.Linear(1024, 10)).eval()


@pytest.mark.parametrize("count", [1, 2])
def test_the_mean_feature_shows_samples_that_the_update_leaves_blurred(digits, convolutions, count) -> None:
    images, labels = digits
    own = (labels == 6).nonzero().flatten()[20 : 20 + count]
    chosen = torch.cat([own, (labels != 6).nonzero().flatten()[40:43]])
    batch, truth = dm.Batch(images[chosen], labels[chosen]), dm.Batch(images[own], labels[own])
    worst = {}
    for matched in (None, "update"):
        attack = dm.attack("gradfilt", targets=(6,), steps=300, matched=matched)
        found = dm.reconstruct(dm.observe(attack.tamper(convolutions), batch), attack)
        worst[matched] = float(dm.score(found, truth, metrics=["psnr"])["psnr"].min())
        if matched is None:
            features = [convolutions[:-1](inputs).mean(0).detach() for inputs in (found.inputs, truth.inputs)]
            assert float((features[0] - features[1]).norm()) < 2e-3 * float(features[1].norm())
            assert ("4 of 8 restarts ended after their trial" in found.message) == (count > 1)
    assert worst[None] > 40
    assert worst[None] > worst["update"] + 6


def test_features_behind_a_narrow_layer_are_not_matched_alone(digits, classifier) -> None:
    images, labels = digits
    attack = dm.attack("gradfilt", targets=(6,), steps=5)
    chosen = torch.cat([(labels == 6).nonzero().flatten()[:1], (labels != 6).nonzero().flatten()[:2]])
    batch = dm.Batch(images[chosen], labels[chosen])
    found = [dm.reconstruct(dm.observe(a.tamper(classifier), batch), a) for a in (attack, replace(attack, matched="update"))]
    assert torch.equal(found[0].inputs, found[1].inputs)


def test_total_variation_fades_by_the_same_factor_from_stair_to_stair() -> None:
    prior = FadingVariation(weight=0.3, last=3e-4, stairs=4)
    assert [prior.weight_at(progress) for progress in (0.0, 0.24, 0.3, 0.6, 0.8, 1.0)] == pytest.approx([0.3, 0.3, 0.03, 3e-3, 3e-4, 3e-4])


def test_a_head_without_bias_is_given_one_and_nothing_of_the_callers_is_touched(crowd) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10, bias=False))
    before = copy.deepcopy(model.state_dict())
    rigged = dm.attack("gradfilt", targets=(0,), input_shape=(1, 8, 8)).tamper(model)
    assert list(model.state_dict()) == list(before)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    estimate = dm.recover_labels(dm.observe(rigged, crowd), "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(crowd.targets, minlength=10))


def test_a_batch_without_targets_is_said_to_hold_none(digits, classifier) -> None:
    images, labels = digits
    chosen = (labels != 9).nonzero().flatten()[:6]
    attack = dm.attack("gradfilt", targets=(9,))
    found = dm.reconstruct(dm.observe(attack.tamper(classifier), dm.Batch(images[chosen], labels[chosen])), attack)
    assert len(found.inputs) == 0
    assert found.outcome is dm.Outcome.NOT_ATTEMPTED
    assert "0 of 6" in found.message


@pytest.mark.parametrize(
    ("option", "phrase"), [("expected", "gradfilt_imprint"), ("threshold", "gradfilt_imprint"), ("learning_rate", "inverting_gradients")]
)
def test_an_option_of_an_earlier_version_is_refused_with_what_stands_in_for_it(option, phrase) -> None:
    with pytest.raises(ValueError, match=f"{option}.*{phrase}"):
        dm.attack("gradfilt", targets=(3,), **{option: 4})


def test_the_objective_at_the_target_samples_is_lower_than_elsewhere(digits, convolutions) -> None:
    images, labels = digits
    rows = torch.cat([(labels == 6).nonzero().flatten()[:1], (labels != 6).nonzero().flatten()[:3]])
    attack = dm.attack("gradfilt", targets=(6,), steps=20)
    exposure = dm.observe(attack.tamper(convolutions), dm.Batch(images[rows], labels[rows]))
    found = dm.reconstruct(exposure, attack)
    truth, elsewhere = (attack.objective(exposure, found, inputs, labels[rows[:1]]) for inputs in (images[rows[:1]], found.inputs))
    assert elsewhere == pytest.approx(found.objective, rel=1e-4)
    assert truth < 0.1 * elsewhere


def test_refusals(classifier, batch) -> None:
    with pytest.raises(dm.Refused, match="bears its filter"):
        dm.recover_labels(dm.observe(classifier, batch), "gradfilt")
    with pytest.raises(dm.Refused, match="bears its filter"):
        dm.reconstruct(dm.observe(classifier, batch), "gradfilt", targets=(1,))
    with pytest.raises(ValueError, match=r"attack\.targets"):
        dm.attack("gradfilt", targets=(10,)).tamper(classifier)
    rigged = dm.attack("gradfilt", targets=(1,)).tamper(classifier)
    with pytest.raises(dm.Refused, match="filters for \\[1\\]"):
        dm.recover_labels(dm.observe(rigged, batch), "gradfilt", targets=(2,))
    with pytest.raises(dm.Refused, match="cross-entropy or focal"):
        dm.recover_labels(dm.observe(rigged, batch, loss=dm.BinaryCrossEntropy()), "gradfilt")
