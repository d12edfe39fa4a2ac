"""The subspace method: exact on clean gradients, honest on spoilt ones."""

import numpy as np
import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.features.subspace import Subspace
from dosimeter.registry import MODELS
from dosimeter.types import LabelEstimate, Outcome, Refused

from .conftest import Case, case_of, errors, false_certificates


def assert_all_found(found, case: Case, tolerance: float) -> None:
    error = errors(found, case)
    assert len(found.features) == len(case.labels)
    assert bool(found.certified.all()), found.message
    assert float(error.max()) < tolerance
    assert bool((error <= found.error_bar).all())
    assert found.complete
    assert found.batch_size == len(case.labels)
    assert found.outcome is Outcome.COMPLETED
    assert torch.equal(found.labels.sort().values, case.labels.sort().values)


@pytest.mark.parametrize("size", [1, 3, 8, 16, 32])
def test_every_sample_of_a_float32_gradient_without_labels(make, size):
    case = make(size, train=size > 1)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-4)


@pytest.mark.parametrize("size", [8, 32])
def test_every_sample_of_a_float64_gradient_in_eval_mode(make, size):
    case = make(size, dtype=torch.float64, train=False)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-6)


@pytest.mark.parametrize("same", [2, 4, 6, 8])
def test_samples_of_one_label_are_separated(make, same):
    labels = torch.arange(8)
    labels[:same] = 42
    case = make(labels)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-4)


def test_neither_bias_nor_batch_size_is_needed(make):
    case = make(12, bias=False, declare_batch_size=False)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-3)


def test_negative_features_are_found_as_well(make):
    case = make(8, activation=nn.Tanh)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-4)


def test_smoothing_and_temperature_are_part_of_the_equations(make):
    case = make(8, loss=dm.CrossEntropy(smoothing=0.2, temperature=1.5))
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, 1e-4)


@pytest.mark.parametrize("strength", [0.0, 0.07, 0.3])
def test_smoothing_that_nobody_declared_is_found(make, strength):
    labels = torch.tensor([4, 4, 9, 30, 31, 77])
    soft = (1 - strength) * nn.functional.one_hot(labels, 100) + strength / 100
    case = make(soft.float())
    case = Case(case.exposure, case.features, labels)
    found = dm.recover_features(case.exposure, "subspace", targets="smoothed")
    assert_all_found(found, case, 1e-3)
    if strength:
        assert float((found.soft.sum(1) - 1).abs().max()) < 1e-5
        assert float(found.soft.amin(1).max()) == pytest.approx(strength / 100, rel=1e-3)


def test_clipping_hides_nothing(make):
    """The spaces do not depend on the gradient's scale."""
    case = make(8, defenses=(dm.defense("clipping", max_norm=0.05),))
    found = dm.recover_features(case.exposure, "subspace")
    assert_all_found(found, case, 1e-4)


def test_a_sample_that_occurs_twice_is_returned_twice():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100)).eval()
    inputs = torch.rand(5, 64, generator=torch.Generator().manual_seed(0))
    inputs = torch.cat([inputs, inputs[:2]])
    case = case_of(model, inputs, torch.tensor([7, 8, 9, 10, 11, 7, 8]))
    found = dm.recover_features(case.exposure, "subspace")
    assert int(found.certified.sum()) == 7
    assert found.batch_size == 7
    assert float(errors(found, case).max()) < 1e-3


def test_given_labels_carry_a_batch_that_single_samples_do_not_determine(make):
    """Six samples, ten classes: three equations a sample for six unknowns, but together they are determined."""
    for seed in range(3):
        case = make(6, classes=10, seed=seed)
        found = dm.recover_features(case.exposure, "subspace", labels=case.labels)
        assert_all_found(found, case, 1e-3)


def test_a_bias_gives_what_a_full_rank_lacks(make):
    """Nine samples, ten classes: 81 equations for 81 unknowns, and nine more from the bias gradient."""
    case = make(9, classes=10, seed=4)
    found = dm.recover_features(case.exposure, "subspace", labels=case.labels)
    assert int(found.certified.sum()) >= 5
    assert false_certificates(found, case) == 0


def test_wrong_labels_do_not_make_wrong_certificates(make):
    case = make(8, seed=5)
    wrong = LabelEstimate(counts=torch.bincount((case.labels + 1) % 100, minlength=100), labels=((case.labels + 1) % 100).sort().values)
    found = dm.recover_features(case.exposure, "subspace", labels=wrong)
    assert false_certificates(found, case) == 0
    assert int(found.certified.sum()) == 8


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gaussian_noise", {"std": 1e-6}),
        ("gaussian_noise", {"std": 1e-4}),
        ("gaussian_noise", {"std": 1e-2}),
        ("laplace_noise", {"scale": 1e-5}),
        ("pruning", {"ratio": 0.3}),
        ("pruning", {"ratio": 0.99}),
        ("quantisation", {"bits": 8}),
        ("clipping", {"max_norm": 1e-3, "mode": "value"}),
    ],
)
def test_a_spoilt_gradient_gives_fewer_certificates_and_no_false_one(make, name, options):
    for seed in range(2):
        case = make(8, seed=seed, defenses=(dm.defense(name, **options),))
        found = dm.recover_features(case.exposure, "subspace")
        assert false_certificates(found, case) == 0


def test_weak_noise_leaves_certificates_with_honest_bars(make):
    clean, noisy = make(8), make(8, defenses=(dm.defense("gaussian_noise", std=1e-6),))
    before, after = (dm.recover_features(case.exposure, "subspace") for case in (clean, noisy))
    assert int(after.certified.sum()) == 8
    assert float(after.error_bar.median()) > 3 * float(before.error_bar.median())
    assert float(errors(after, noisy).max()) > float(errors(before, clean).max())


def test_several_local_steps_are_never_certified(make):
    case = make(4, training=dm.FedAvg(steps=3, learning_rate=0.1))
    found = dm.recover_features(case.exposure, "subspace")
    assert not bool(found.certified.any())
    assert "local steps" in found.message


def test_more_samples_than_the_head_can_hold_are_not_certified(make):
    case = make(12, classes=10)
    found = dm.recover_features(case.exposure, "subspace")
    assert not bool(found.certified.any())
    assert found.outcome is Outcome.SINGULAR
    assert "full rank" in found.message


def test_other_losses_are_refused(make):
    case = make(4, loss=dm.Focal())
    with pytest.raises(Refused, match="cross-entropy"):
        dm.recover_features(case.exposure, "subspace")


def test_options_are_checked():
    with pytest.raises(ValueError, match="starts"):
        Subspace(starts=0)


def real_case(
    shared_data, classes: int, labels: torch.Tensor, *, train: bool, dtype: torch.dtype, seed: int, network: str = "resnet18"
) -> Case:
    arrays = np.load(shared_data / "cifar100.npz")
    rng = torch.Generator().manual_seed(seed)
    chosen = torch.randperm(len(arrays["train_images"]), generator=rng)[: len(labels)]
    inputs = torch.from_numpy(arrays["train_images"][chosen.numpy()]).permute(0, 3, 1, 2).to(dtype) / 255
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = MODELS.build(network, classes=classes).to(dtype).train(train)
    return case_of(model, inputs, labels)


@pytest.mark.parametrize(("train", "dtype", "tolerance"), [(True, torch.float32, 1e-3), (False, torch.float64, 1e-6)])
def test_real_images_in_an_untrained_residual_net(shared_data, train, dtype, tolerance):
    labels = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(11))
    case = real_case(shared_data, 100, labels, train=train, dtype=dtype, seed=11, network="resnet20")
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(("classes", "size"), [(100, 8), (100, 32), (1000, 64)])
@pytest.mark.parametrize(("train", "dtype", "tolerance"), [(True, torch.float32, 1e-3), (False, torch.float64, 1e-6)])
def test_real_images_at_every_size(shared_data, classes, size, train, dtype, tolerance):
    labels = torch.randint(0, classes, (size,), generator=torch.Generator().manual_seed(21))
    case = real_case(shared_data, classes, labels, train=train, dtype=dtype, seed=21)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize("same", [2, 4, 6, 8])
@pytest.mark.parametrize("classes", [100, 1000])
@pytest.mark.parametrize(("train", "dtype", "tolerance"), [(True, torch.float32, 1e-3), (False, torch.float64, 1e-6)])
def test_real_images_of_one_label(shared_data, same, classes, train, dtype, tolerance):
    labels = torch.arange(8) + 10
    labels[:same] = 3
    case = real_case(shared_data, classes, labels, train=train, dtype=dtype, seed=31)
    assert_all_found(dm.recover_features(case.exposure, "subspace"), case, tolerance)


@pytest.mark.slow
def test_collinear_float32_features_stay_within_their_bars(shared_data):
    """Eval mode at initialisation: features nearly collinear, so float32 leaves some samples of repeated labels open."""
    certified = 0
    for seed in range(4):
        labels = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(seed))
        case = real_case(shared_data, 100, labels, train=False, dtype=torch.float32, seed=seed)
        found = dm.recover_features(case.exposure, "subspace")
        assert false_certificates(found, case) == 0
        certified += int(found.certified.sum())
    assert certified >= 58


@pytest.mark.slow
def test_forty_eight_samples_of_a_hundred_classes_with_labels(make):
    case = make(48, features=512, seed=2)
    assert_all_found(dm.recover_features(case.exposure, "subspace", labels=case.labels), case, 1e-3)
