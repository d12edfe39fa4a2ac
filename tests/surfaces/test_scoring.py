"""Scores of inputs, features and labels: the truth's order, the nulls, the misses and the refusals."""

import math

import numpy as np
import pytest
import torch
from skimage.metrics import peak_signal_noise_ratio
from sklearn.datasets import load_digits
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import input_of
from dosimeter.normalization import from_pixels
from dosimeter.surfaces.intervals import beats, summarize
from dosimeter.surfaces.scoring import Scores


@pytest.fixture(autouse=True)
def _no_weights_from_the_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("DOSIMETER_LPIPS_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def digits() -> dm.Batch:
    bunch = load_digits()
    return dm.Batch(torch.from_numpy(bunch.images[:200, None] / 16).float(), torch.from_numpy(bunch.target[:200]))


def first(batch: dm.Batch, count: int, start: int = 0) -> dm.Batch:
    return dm.Batch(batch.inputs[start : start + count], batch.targets[start : start + count])


def reconstruction(inputs: torch.Tensor, **options) -> dm.Reconstruction:
    return dm.Reconstruction(inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.int64), objective=0.0, **options)


def estimate(labels, classes: int, soft=None) -> dm.LabelEstimate:
    labels = torch.tensor(labels)
    return dm.LabelEstimate(counts=torch.bincount(labels, minlength=classes), labels=labels, soft=soft)


def test_bare_scores_are_a_mapping_in_the_truths_order(digits, rng):
    truth = first(digits, 8)
    order = torch.randperm(8, generator=rng)
    recovered = truth.inputs[order] + 0.1 * torch.randn(8, 1, 8, 8, generator=rng)
    scores = dm.score(reconstruction(recovered), truth)
    assert isinstance(scores, Scores)
    assert set(scores) == {"psnr", "ssim", "mse"}
    assert scores.assignment.tolist() == order.argsort().tolist()
    back = recovered[order.argsort()]
    expected = [peak_signal_noise_ratio(t.double().numpy(), r.double().numpy(), data_range=1.0) for t, r in zip(truth.inputs, back)]
    assert scores["psnr"].tolist() == pytest.approx(expected, abs=1e-4)
    assert scores["mse"].tolist() == pytest.approx((back - truth.inputs).square().flatten(1).mean(1).tolist(), rel=1e-5)
    assert set(scores.unavailable) == {"lpips"}
    assert scores.misses == 0
    assert scores.warnings == ()


def test_an_exact_hit_in_any_order_scores_the_cap_everywhere(digits):
    truth = first(digits, 6)
    scores = dm.score(reconstruction(truth.inputs.flip(0)), truth)
    assert scores["psnr"].tolist() == [100.0] * 6
    assert scores["mse"].tolist() == [0.0] * 6
    assert scores["ssim"].tolist() == pytest.approx([1.0] * 6, abs=1e-6)


def test_both_sides_are_unnormalised(digits, rng):
    normalization = dm.Normalization(mean=(0.3,), std=(0.2,))
    truth = first(digits, 5)
    recovered = truth.inputs + 0.1 * torch.randn(5, 1, 8, 8, generator=rng)
    plain = dm.score(reconstruction(recovered), truth)
    scaled_truth = dm.Batch(from_pixels(truth.inputs, normalization), truth.targets)
    scaled = from_pixels(recovered, normalization)
    auxiliary = first(digits, 30, 100)
    scaled_auxiliary = dm.Batch(from_pixels(auxiliary.inputs, normalization), auxiliary.targets)
    for scores in (
        dm.score(reconstruction(scaled, normalization=normalization), scaled_truth, auxiliary=scaled_auxiliary),
        dm.score(reconstruction(scaled), scaled_truth, normalization=normalization, auxiliary=scaled_auxiliary),
    ):
        assert scores["psnr"].tolist() == pytest.approx(plain["psnr"].tolist(), abs=1e-3)
        expected = dm.score(reconstruction(recovered), truth, auxiliary=auxiliary).nulls["nearest"]["psnr"]
        assert scores.nulls["nearest"]["psnr"].tolist() == pytest.approx(expected.tolist(), abs=1e-3)


def test_nulls_are_the_mean_the_nearest_and_the_foreign(digits, rng):
    truth, auxiliary, other = first(digits, 6), first(digits, 40, 50), first(digits, 6, 120)
    recovered, foreign = (reconstruction(batch.inputs[torch.randperm(6, generator=rng)]) for batch in (truth, other))
    scores = dm.score(recovered, truth, auxiliary=auxiliary, foreign=foreign)
    assert set(scores.nulls) == {"mean", "nearest", "foreign"}
    true, public = truth.inputs.double().numpy(), auxiliary.inputs.double().numpy()
    assert scores.nulls["mean"]["mse"].tolist() == pytest.approx(np.mean((true - public.mean(0)) ** 2, axis=(1, 2, 3)).tolist(), rel=1e-5)
    every = np.mean((true[:, None] - public[None]) ** 2, axis=(2, 3, 4))  # (B, N)
    assert scores.nulls["nearest"]["mse"].tolist() == pytest.approx(every.min(1).tolist(), rel=1e-5)
    assert scores.nulls["foreign"]["mse"].tolist() == pytest.approx(dm.score(foreign, truth)["mse"].tolist())
    for null in scores.nulls.values():
        assert set(null) == set(scores)
        assert beats(scores["psnr"], null["psnr"], True, 1.0)
        assert not beats(null["psnr"], scores["psnr"], True)


def test_without_auxiliary_data_the_null_is_mid_gray(digits):
    truth = first(digits, 4)
    scores = dm.score(reconstruction(truth.inputs), truth)
    assert list(scores.nulls) == ["gray"]
    assert scores.nulls["gray"]["mse"].tolist() == pytest.approx((truth.inputs - 0.5).square().flatten(1).mean(1).tolist(), rel=1e-5)


def test_a_constant_image_does_not_beat_its_nulls(digits):
    truth, auxiliary = first(digits, 16), first(digits, 100, 100)
    constant = auxiliary.inputs.mean(0, keepdim=True).repeat(16, 1, 1, 1)
    scores = dm.score(reconstruction(constant), truth, auxiliary=auxiliary)
    assert float(scores["psnr"].median()) > 10  # the number that is often read as leakage
    assert not any(beats(scores["psnr"], null["psnr"], True) for null in scores.nulls.values())


def test_fewer_recovered_than_true_are_misses(digits):
    truth = first(digits, 5)
    scores = dm.score(reconstruction(truth.inputs[[4, 1]]), truth)
    assert scores.assignment.tolist() == [-1, 1, -1, -1, 0]
    assert scores.misses == 3
    assert scores["psnr"].isnan().tolist() == [True, False, True, True, False]
    assert summarize(scores["psnr"], True).median is None
    assert not beats(scores["psnr"], scores.nulls["gray"]["psnr"], True)


def test_what_is_not_finite_is_missed_and_what_is_huge_is_worthless(digits):
    truth = first(digits, 4)
    recovered = truth.inputs.clone()
    recovered[0] = torch.nan
    recovered[1, 0, 3, 3] = torch.inf
    scores = dm.score(reconstruction(recovered), truth, auxiliary=first(digits, 10, 50))
    assert scores.assignment.tolist() == [-1, -1, 2, 3]
    assert scores["psnr"].isnan().tolist() == [True, True, False, False]
    everything = dm.score(reconstruction(torch.full_like(recovered, torch.nan)), truth)
    assert everything.misses == 4
    huge = dm.score(reconstruction(1e30 * truth.inputs), truth)
    assert float(huge["psnr"].max()) < -500
    assert not beats(huge["ssim"], huge.nulls["gray"]["ssim"], True)


def test_more_recovered_than_true_are_matched_to_the_best(digits):
    truth = first(digits, 3)
    recovered = torch.cat([torch.zeros(2, 1, 8, 8), truth.inputs, torch.ones(1, 1, 8, 8)])
    scores = dm.score(reconstruction(recovered), truth)
    assert scores.assignment.tolist() == [2, 3, 4]
    assert scores["psnr"].tolist() == [100.0] * 3


def test_auxiliary_data_that_hold_the_truth_are_told(digits):
    truth = first(digits, 4)
    scores = dm.score(reconstruction(truth.inputs), truth, auxiliary=first(digits, 20, 2))
    assert scores.warnings == ("2 of 4 private samples are in the auxiliary data too, so that their nearest null is exact",)


def test_a_truth_that_is_not_in_pixels_is_told(digits):
    truth = dm.Batch(4 * digits.inputs[:2] - 2, digits.targets[:2])
    (warning,) = dm.score(reconstruction(truth.inputs), truth).warnings
    assert warning.startswith("true pixels reach from -2 to 2")


def test_inputs_that_are_no_images_have_no_ssim():
    inputs = torch.rand(4, 20, generator=torch.Generator().manual_seed(1))
    scores = dm.score(reconstruction(inputs), dm.Batch(inputs, torch.zeros(4, dtype=torch.int64)))
    assert set(scores) == {"psnr", "mse"}
    assert "got samples of shape (20,)" in scores.unavailable["ssim"]


def test_chosen_metrics_alone_are_computed_and_the_inputs_stay_as_they_are(digits):
    truth = first(digits, 3)
    before = truth.inputs.clone()
    scores = dm.score(reconstruction(truth.inputs), truth, metrics=["mse"])
    assert list(scores) == ["mse"]
    assert scores.unavailable == {}
    assert torch.equal(truth.inputs, before)


def test_lpips_is_scored_where_its_weights_are(shared_data, monkeypatch):
    weights = shared_data / "weights" / "lpips_alex_v0.1_full_fp32.pth"
    if not weights.is_file():
        pytest.skip(f"no LPIPS weights at {weights}")
    monkeypatch.setenv("DOSIMETER_LPIPS_WEIGHTS", str(weights))
    inputs = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    scores = dm.score(reconstruction(inputs), dm.Batch(inputs, torch.zeros(3, dtype=torch.int64)))
    assert scores["lpips"].tolist() == [0.0] * 3
    assert float(scores.nulls["gray"]["lpips"].min()) > 0.1


def test_label_scores_by_hand():
    truth = dm.Batch(torch.zeros(8, 1), torch.tensor([2, 0, 0, 1, 0, 0, 2, 1]))  # counts 4, 2, 2
    scores = dm.score(estimate([0, 0, 0, 1, 1, 1, 2, 2], classes=4), truth)
    assert {name: float(value) for name, value in scores.items()} == pytest.approx(
        {"leacc": 1.0, "lnacc": 0.5, "clsacc": 1.0, "insacc": 7 / 9}
    )
    assert scores.assignment is None
    assert scores.misses == 0


def test_the_number_of_classes_widens_the_counts():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = dm.score(estimate([0, 0], classes=2), truth, classes=10)
    assert float(scores["leacc"]) == pytest.approx(0.9)
    assert float(scores["lnacc"]) == pytest.approx(0.8)
    assert float(scores["clsacc"]) == pytest.approx(0.5)


def test_the_prior_is_the_mean_over_labels_drawn_at_random():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([0, 1]))
    scores = dm.score(estimate([0, 1], classes=4), truth)
    # of 16 ordered pairs: 2 are right (1), 10 share one label (1/3), 4 share none (0)
    assert float(scores.nulls["prior"]["insacc"]) == pytest.approx((2 + 10 / 3) / 16, abs=0.01)
    again = dm.score(estimate([0, 1], classes=4), truth)
    assert torch.equal(scores.nulls["prior"]["insacc"], again.nulls["prior"]["insacc"])


def test_the_prior_follows_the_auxiliary_labels_and_rules_out_no_class():
    truth = dm.Batch(torch.zeros(1, 1), torch.tensor([0]))
    auxiliary = dm.Batch(torch.zeros(16, 1), torch.tensor([0] * 14 + [1] * 2))
    null = dm.score(estimate([0], classes=4), truth, auxiliary=auxiliary).nulls["prior"]
    assert float(null["insacc"]) == pytest.approx(15 / 20, abs=0.02)
    without = dm.Batch(torch.zeros(16, 1), torch.tensor([1] * 16))
    assert 0.02 < float(dm.score(estimate([0], classes=4), truth, auxiliary=without).nulls["prior"]["insacc"]) < 0.08
    soft = dm.Batch(auxiliary.inputs, nn.functional.one_hot(auxiliary.targets, 4).double())
    same = dm.score(estimate([0], classes=4), truth, auxiliary=soft).nulls["prior"]
    assert float(same["insacc"]) == float(null["insacc"])


def test_chance_is_a_valid_probability_whatever_the_bias_of_the_method(rng):
    """Of estimates that know nothing, one that always says one class among them, at most a share p has chance ≤ p."""
    for guess in (lambda: [3, 3], lambda: torch.randint(0, 10, (2,), generator=rng).tolist(), lambda: [0, 1]):
        chances = []
        for _ in range(300):
            truth = dm.Batch(torch.zeros(2, 1), torch.randint(0, 10, (2,), generator=rng))
            chances.append(dm.score(estimate(guess(), classes=10), truth, metrics=["insacc"]).details["chance"])
        chances = torch.tensor(chances)
        for level in (0.015, 0.05, 0.25):
            assert float((chances <= level).double().mean()) <= level + 3 * (level / 300) ** 0.5


def test_how_labels_repeat_is_no_leak():
    """Of all estimates with these repeats only the classes tell: one class of ten by luck in a tenth, each class once always."""
    single = dm.Batch(torch.zeros(8, 1), torch.tensor([3] * 8))
    assert dm.score(estimate([3] * 8, classes=10), single).details["chance"] == pytest.approx(0.1, abs=0.01)
    every = dm.Batch(torch.zeros(10, 1), torch.arange(10))
    assert dm.score(estimate(list(range(10)), classes=10), every).details["chance"] == 1.0


def test_chance_by_hand():
    truth = dm.Batch(torch.zeros(2, 1), torch.tensor([3, 3]))
    details = dm.score(estimate([3, 3], classes=10), truth).details
    assert details["chance"] == pytest.approx(1 / 10, abs=0.01)  # renamed: one class of ten; drawn anew: one of 100 ordered pairs
    pair = dm.Batch(torch.zeros(2, 1), torch.tensor([3, 5]))
    assert dm.score(estimate([3, 5], classes=10), pair).details["chance"] == pytest.approx(1 / 45, abs=0.005)
    assert dm.score(estimate([1, 2], classes=10), truth).details["chance"] == 1.0


def test_soft_labels_are_matched_and_scored_by_sample():
    targets = torch.tensor([[0.7, 0.3, 0.0], [0.0, 0.1, 0.9]], dtype=torch.float64)
    soft = torch.tensor([[0.0, 0.2, 0.8], [0.7, 0.3, 0.0]], dtype=torch.float64)
    scores = dm.score(estimate([0, 2], classes=3, soft=soft), dm.Batch(torch.zeros(2, 1), targets))
    assert scores.assignment.tolist() == [1, 0]
    assert scores["label_l1"].tolist() == pytest.approx([0.0, 0.2])
    assert float(scores["insacc"]) == 1.0
    assert scores.nulls["prior"]["label_l1"].tolist() == pytest.approx([22 / 30, 34 / 30])
    hard = dm.score(estimate([0, 2], classes=3), dm.Batch(torch.zeros(2, 1), targets))
    assert hard["label_l1"].tolist() == pytest.approx([0.6, 0.2])


def test_a_foreign_label_estimate_is_a_null():
    truth = dm.Batch(torch.zeros(4, 1), torch.tensor([0, 0, 1, 3]))
    scores = dm.score(estimate([0, 0, 1, 3], classes=4), truth, foreign=estimate([2, 2, 2, 1], classes=4))
    assert float(scores.nulls["foreign"]["insacc"]) == pytest.approx(1 / 7)
    assert float(scores["insacc"]) == 1.0


@pytest.fixture
def seen(normed_classifier, digits):
    """A train-mode model with batch norm, its exposure and the true features."""
    truth = first(digits, 6)
    exposure = dm.observe(normed_classifier.train(), truth, auxiliary=first(digits, 60, 100))
    return exposure, truth, input_of(exposure.model, "4", truth.inputs)


def features_of(features, labels, **options) -> dm.FeatureEstimate:
    certified = options.pop("certified", torch.ones(len(features), dtype=torch.bool))
    return dm.FeatureEstimate(features=features, labels=labels, residual=torch.zeros(len(features)), certified=certified, **options)


def test_features_are_scored_against_what_the_model_really_computed(seen):
    exposure, truth, true = seen
    recovered = 1.005 * true.flip(0).double()
    scores = dm.score(features_of(recovered, truth.targets.flip(0)), truth, exposure=exposure)
    assert scores.assignment.tolist() == [5, 4, 3, 2, 1, 0]
    assert scores["feature_error"].tolist() == pytest.approx([0.005] * 6, rel=1e-3)
    assert scores["feature_cosine"].tolist() == pytest.approx([1.0] * 6)
    assert scores.details == {"recovered": 6, "certified": 6, "false_certificates": 0}
    assert set(scores.nulls) == {"mean", "nearest"}
    assert bool((scores.nulls["nearest"]["feature_error"] > 0.1).all())


def test_the_mean_feature_null_runs_the_auxiliary_data_through_the_model(seen):
    exposure, truth, true = seen
    scores = dm.score(features_of(true, truth.targets), truth, exposure=exposure)
    mean = input_of(exposure.model, "4", exposure.auxiliary.inputs).mean(0)
    expected = (true - mean).norm(dim=1) / true.norm(dim=1)
    assert scores.nulls["mean"]["feature_error"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_without_auxiliary_data_the_null_is_the_zero_vector(classifier, digits):
    truth = first(digits, 3)
    exposure = dm.observe(classifier, truth)
    true = input_of(exposure.model, "5", truth.inputs)
    scores = dm.score(features_of(true, truth.targets), truth, exposure=exposure, foreign=features_of(2 * true, truth.targets))
    assert scores.nulls["zero"]["feature_error"].tolist() == [1.0] * 3
    assert scores.nulls["zero"]["feature_cosine"].tolist() == [0.0] * 3
    assert set(scores.nulls) == {"zero", "foreign"}


def test_false_certificates_are_counted(seen):
    exposure, truth, true = seen
    features, labels = true.clone(), truth.targets.clone()
    features[0] *= 1.5
    labels[1] = (labels[1] + 1) % 10
    features[2] *= 3
    certified = torch.tensor([True, True, False, True, True, True])
    details = dm.score(features_of(features, labels, certified=certified), truth, exposure=exposure).details
    assert details == {"recovered": 6, "certified": 5, "false_certificates": 2}


def test_fewer_features_are_misses_and_dropout_is_told(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.Dropout(0.5), nn.Linear(16, 10)).train()
    truth = first(digits, 4)
    exposure = dm.observe(model, truth)
    scores = dm.score(features_of(torch.zeros(1, 16), truth.targets[:1]), truth, exposure=exposure)
    assert scores.misses == 3
    assert "drops units at random" in scores.warnings[0]


def test_refuses_what_cannot_be_scored(digits, seen):
    truth, found = first(digits, 2), reconstruction(digits.inputs[:2])
    exposure, _, true = seen
    with pytest.raises(TypeError, match="found: expected a Reconstruction, a FeatureEstimate or a LabelEstimate, got Tensor"):
        dm.score(digits.inputs, truth)
    with pytest.raises(TypeError, match="foreign: expected a Reconstruction like what is scored, got LabelEstimate"):
        dm.score(found, truth, foreign=estimate([0], 2))
    with pytest.raises(ValueError, match=r"found.inputs: expected samples of shape \(1, 8, 8\), got \(3, 4, 4\)"):
        dm.score(reconstruction(torch.zeros(2, 3, 4, 4)), truth)
    with pytest.raises(ValueError, match="normalization: expected 1 or 1 means and stds"):
        dm.score(found, truth, normalization=dm.Normalization(mean=(0.1, 0.2), std=(1.0, 1.0)))
    with pytest.raises(ValueError, match="metrics: insacc scores labels, but what was recovered are inputs"):
        dm.score(found, truth, metrics=["insacc"])
    with pytest.raises(ValueError, match="no metric named 'pnsr'; did you mean 'psnr'"):
        dm.score(found, truth, metrics=["pnsr"])
    with pytest.raises(ValueError, match="exposure: scoring features needs the exposure"):
        dm.score(features_of(true, digits.targets[:6]), first(digits, 6))
    with pytest.raises(ValueError, match=r"found.features: expected \(n, 256\) as the model's last layer takes, got \(6, 3\)"):
        dm.score(features_of(true[:, :3], digits.targets[:6]), first(digits, 6), exposure=exposure)
    with pytest.raises(ValueError, match="truth: expected a Batch of at least one sample"):
        dm.score(found, dm.Batch(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64)))
    with pytest.raises(ValueError, match="truth: has NaN or infinite inputs"):
        dm.score(found, dm.Batch(truth.inputs * math.nan, truth.targets))
    with pytest.raises(ValueError, match="auxiliary: expected at least one sample, or None"):
        dm.score(found, truth, auxiliary=first(digits, 0))
