"""The subspace method: exact on clean gradients, honest on spoilt ones."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import one_hot

import dosimeter as dm
from dosimeter.defenses.outgoing import OutgoingDefense, live_entries
from dosimeter.features.subspace import Subspace
from dosimeter.models.loading import load_model
from dosimeter.network.head import find_head
from dosimeter.registry import MODELS
from dosimeter.types import LabelEstimate, Outcome, Refused, Update

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


def blended(size: int, classes: int, seed: int, *, one_share: bool = False) -> torch.Tensor:
    """Labels of two random classes each, as mixup makes them: (B, C)."""
    rng = torch.Generator().manual_seed(seed)
    labels = nn.functional.one_hot(torch.randint(0, classes, (size,), generator=rng), classes).float()
    share = torch.rand(1 if one_share else size, 1, generator=rng)
    return share * labels + (1 - share) * labels.roll(1, 0)


def soft_label_error(found, case: Case) -> torch.Tensor:
    """L1 error of each soft label against that of the nearest true sample."""
    nearest = torch.cdist(found.features.double(), case.features).argmin(1)
    return (found.soft - case.labels[nearest]).abs().sum(1)


@pytest.mark.parametrize("size", [4, 8, 16])
@pytest.mark.parametrize("one_share", [False, True])
def test_mixed_labels_are_found_with_their_shares(make, size, one_share):
    """Nobody says that labels are mixed, nor how: two classes and a share a sample, and all features."""
    for seed in range(2):
        case = make(blended(size, 100, seed, one_share=one_share), features=256, seed=seed)
        found = dm.recover_features(case.exposure, "subspace")
        hard = Case(case.exposure, case.features, torch.zeros(size, dtype=torch.long))
        assert found.complete
        assert int(found.certified.sum()) == size
        error = errors(replace(found, labels=torch.zeros(size, dtype=torch.long)), hard)
        assert bool((error <= found.error_bar).all())
        assert float(soft_label_error(found, case).max()) < 1e-4
        assert torch.equal(found.soft.argmax(1), found.labels)


def test_a_soft_label_is_what_the_whole_batch_leaves_of_the_probabilities(make):
    """Y = P − B·D with D = (∇W F⁺)ᵀ needs no assumption on the labels, and agrees with the pairs that were found."""
    case = make(blended(8, 100, 3), features=256, seed=3)
    found = dm.recover_features(case.exposure, "subspace")
    head = find_head(case.exposure)
    features = found.features.double()
    d = (head.weight_gradient.double() @ torch.linalg.pinv(features)).T
    y = torch.softmax(head.logits(features), 1) - len(features) * d
    assert float((y - found.soft).abs().max()) < 1e-4


def test_labels_of_three_classes_are_not_certified_as_pairs(make):
    rng = torch.Generator().manual_seed(0)
    shares = torch.rand(4, 3, generator=rng)
    labels = nn.functional.one_hot(torch.randint(0, 100, (4, 3), generator=rng), 100)
    case = make((labels * (shares / shares.sum(1, keepdim=True))[:, :, None]).sum(1))
    assert not bool(dm.recover_features(case.exposure, "subspace").certified.any())


def test_soft_labels_that_are_given_are_used_as_they_are(make):
    """Labels of five classes each, which no search could guess; a row that occurs twice stands for two samples."""
    rng = torch.Generator().manual_seed(1)
    soft = torch.zeros(6, 100).scatter_(1, torch.stack([torch.randperm(100, generator=rng)[:5] for _ in range(6)]), 0.2)
    soft[5] = soft[4]
    case = make(soft)
    found = dm.recover_features(case.exposure, "subspace", labels=soft)
    assert int(found.certified.sum()) == 6
    assert float(soft_label_error(found, case).max()) < 1e-6
    assert not bool(dm.recover_features(case.exposure, "subspace").certified.any())


def test_labels_given_in_part_complete_a_batch_that_is_not_determined_without(make):
    """Six samples of ten classes without a bias gradient to count by: three labels are given, three are not."""
    for seed in range(3):
        case = make(6, classes=10, seed=seed)
        known = torch.where(torch.arange(6) % 2 == 0, case.labels, -1)
        assert_all_found(dm.recover_features(case.exposure, "subspace", labels=known), case, 1e-3)


def test_only_some_methods_take_labels_in_part(make):
    case = make(4)
    with pytest.raises(Refused, match="every label or none"):
        dm.recover_features(case.exposure, "rgla", labels=torch.tensor([3, -1, 5, 6]))
    with pytest.raises(ValueError, match="-1 for an unknown"):
        dm.recover_features(case.exposure, "subspace", labels=torch.tensor([3, -2, 5, 6]))


@pytest.mark.parametrize("declared", [True, False])
def test_samples_that_are_merely_alike_are_not_taken_for_one_that_occurs_twice(declared):
    """Their difference is a dimension of the gradient of its own, though the mean of the two solves the equations nearly."""
    for seed in range(6):
        rng = torch.Generator().manual_seed(seed)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 100))
        inputs, labels = torch.rand(8, 64, generator=rng), torch.randint(0, 100, (8,), generator=rng)
        inputs[5:] = (inputs[:3] + 10.0 ** -(2 + seed / 2) * torch.randn(3, 64, generator=rng)).clamp(0, 1)
        labels[5:] = labels[:3]
        case = case_of(model, inputs, labels, declare_batch_size=declared)
        found = dm.recover_features(case.exposure, "subspace")
        assert false_certificates(found, case) == 0


def test_clipping_hides_nothing(make):
    """The spaces do not depend on the gradient's scale."""
    case = make(8, defenses=(dm.defense("clipping", max_norm=0.05),))
    found = dm.recover_features(case.exposure, "subspace")
    assert_all_found(found, case, 1e-4)
    assert float(found.error_bar.max()) < 1e-4  # as many equal shares as declared samples leave no room for a hidden twin


def test_clipping_then_noise_leaves_certificates(make):
    defenses = (dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1e-7))
    for seed in range(3):
        case = make(8, seed=seed, defenses=defenses)
        found = dm.recover_features(case.exposure, "subspace")
        assert int(found.certified.sum()) == 8
        assert false_certificates(found, case) == 0


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


@pytest.mark.parametrize("declared", [True, False])
def test_one_input_under_two_labels_is_not_taken_for_two_blended_ones(declared):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100)).eval()
    inputs = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    inputs[1] = inputs[0]
    case = case_of(model, inputs, torch.tensor([3, 60, 8, 41]), declare_batch_size=declared)
    found = dm.recover_features(case.exposure, "subspace")
    assert false_certificates(found, case) == 0
    assert not found.complete
    assert not dm.recover_labels(case.exposure, "subspace").certified
    told = dm.recover_features(case.exposure, "subspace", labels=case.labels)
    assert false_certificates(told, case) == 0


def test_inputs_all_under_two_labels_are_not_taken_for_blended_ones_where_nobody_says_how_many():
    """The gradient of four even blends is the same, number by number."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 100)).eval()
    inputs = torch.rand(4, 64, generator=torch.Generator().manual_seed(0))
    case = case_of(model, torch.cat([inputs, inputs]), torch.tensor([3, 60, 8, 41, 5, 9, 77, 80]), declare_batch_size=False)
    assert not bool(dm.recover_features(case.exposure, "subspace").certified.any())


def test_alike_inputs_under_two_labels_are_not_counted_by_a_share_that_is_not_known():
    """Their features solve the equations to the noise, but along their small difference the share of the gradient is anyone's guess."""
    rng = torch.Generator().manual_seed(123001)
    with torch.random.fork_rng():
        torch.manual_seed(123001)
        model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 100))
    inputs, labels = torch.rand(8, 256, generator=rng), torch.randint(0, 100, (8,), generator=rng)
    inputs[5:] = inputs[:3] + 10.0 ** -(1 + 6 * float(torch.rand((), generator=rng))) * torch.randn(3, 256, generator=rng)
    labels[5:] = (labels[:3] + 7) % 100
    case = case_of(model, inputs.clamp(0, 1), labels, declare_batch_size=False)
    found = dm.recover_features(case.exposure, "subspace")
    assert false_certificates(found, case) == 0
    assert_all_found(found, case, 1e-5)


def test_even_blends_go_by_the_lower_class(make):
    targets = 0.5 * (one_hot(torch.tensor([30, 9, 71]), 100) + one_hot(torch.tensor([12, 55, 8]), 100)).float()
    found = dm.recover_features(make(targets).exposure, "subspace")
    assert found.labels.sort().values.tolist() == [8, 9, 12]
    assert bool(found.certified.all())


def test_the_message_tells_the_rank_of_the_gradient_and_not_the_batch_size(make):
    case = make(8, classes=5, defenses=(dm.defense("gaussian_noise", std=1e-4),))
    assert "full rank, 4 = " in dm.recover_features(case.exposure, "subspace").message


def test_guesses_that_leave_the_gradient_unexplained_have_no_error_bar(make):
    found = dm.recover_features(make(4, defenses=(dm.defense("clipping", max_norm=1e-3, mode="value"),)).exposure, "subspace")
    assert not bool(torch.isfinite(found.error_bar).any())
    assert "unexplained" in found.message


@pytest.mark.parametrize("soft", [torch.full((4, 100), torch.nan), torch.full((4, 100), 0.02), torch.full((4, 100), -0.01)])
def test_soft_labels_that_are_none_are_refused(make, soft):
    with pytest.raises(ValueError, match="soft label"):
        dm.recover_features(make(4).exposure, "subspace", labels=soft)


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


@pytest.mark.parametrize(("declared", "message"), [(3, "more dimensions than the 3"), (6, "more dimensions than the 6")])
def test_a_declared_size_below_the_rank_is_refuted(make, declared, message):
    case = make(8)
    told = replace(case.exposure, public=replace(case.exposure.public, batch_size=declared))
    found = dm.recover_features(told, "subspace")
    assert not bool(found.certified.any())
    assert message in found.message
    assert found.premises == ()


def test_a_declared_size_that_no_share_fits_is_refuted(make):
    case = make(8)
    told = replace(case.exposure, public=replace(case.exposure.public, batch_size=9))
    assert not bool(dm.recover_features(told, "subspace").certified.any())


def test_the_premises_name_the_declared_size_and_what_copies_are(make):
    case = make(4)
    assert not any("copies" in premise for premise in dm.recover_features(case.exposure, "subspace").premises)
    for size, premise in ((8, "the batch size is 8, as declared"), (None, "no batch size is declared")):
        told = replace(case.exposure, public=replace(case.exposure.public, batch_size=size))
        found = dm.recover_features(told, "subspace")
        assert bool(found.certified.all())
        assert len(found.labels) == (size or 4)  # a batch of four pairs of copies has the same gradient
        assert any(premise in each for each in found.premises)
        assert any("copies" in each for each in found.premises)


@pytest.mark.parametrize(("rate", "message"), [(0.1, "more dimensions"), (1e-3, "difference of weights")])
def test_local_steps_that_nobody_declares_are_noticed(make, rate, message):
    case = make(4, train=False, training=dm.FedAvg(steps=3, learning_rate=rate))
    told = replace(case.exposure, public=replace(case.exposure.public, training=dm.FedSGD()))
    found = dm.recover_features(told, "subspace")
    assert not bool(found.certified.any())
    assert message in found.message


@dataclass(frozen=True, kw_only=True)
class Decoy(OutgoingDefense):
    """Averages another gradient in, adds `share` of the noise that it declares, and calls all of it noise."""

    other: Update
    share: float

    def protect(self, update, rng):
        return {
            name: (change + self.other[name]) / 2 + self.share * 1e-6 * torch.randn(change.shape, generator=rng)
            for name, change in update.items()
        }

    def distorts(self):
        return True

    def distortion(self, change, public):
        return live_entries(change, noise=1e-6)

    def scaling(self):
        return "none"


@pytest.mark.parametrize(("share", "declared", "message"), [(0, True, "more dim"), (1, True, "more dim"), (0, False, "declare noise of")])
def test_another_gradient_that_passes_for_noise_is_noticed(make, share, declared, message):
    other = make(4, seed=0, classes=100)
    model, rng = other.exposure.model, torch.Generator().manual_seed(9)
    mine = (torch.rand(4, 64, generator=rng), torch.tensor([3, 60, 8, 41]))
    case = case_of(model, *mine, defenses=(Decoy(other=other.exposure.update, share=share),), declare_batch_size=declared)
    found = dm.recover_features(case.exposure, "subspace")
    assert not bool(found.certified.any())
    assert message in found.message


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
def test_a_residual_net_that_is_sure_of_itself_before_it_is_trained(shared_data):
    """A ResNet-20 in eval mode: a mean top probability of .5 to 1, features nearly collinear and of very different lengths."""
    certified = 0
    for seed in (1, 1001, 1002, 1005):
        labels = torch.randint(0, 100, (16,), generator=torch.Generator().manual_seed(seed))
        case = real_case(shared_data, 100, labels, train=False, dtype=torch.float64, seed=seed, network="resnet20")
        found = dm.recover_features(case.exposure, "subspace")
        assert false_certificates(found, case) == 0
        certified += int(found.certified.sum())
    assert certified >= 52  # the last of them, at .98, leaves half of its samples open


@pytest.mark.slow
def test_forty_eight_samples_of_a_hundred_classes_with_labels(make):
    case = make(48, features=512, seed=2)
    assert_all_found(dm.recover_features(case.exposure, "subspace", labels=case.labels), case, 1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [7100040, 7100043, 7100116, 7100180])
def test_a_label_that_another_fits_as_well_is_not_certified(shared_data, seed):
    """Right features under a wrong label, or error bars of a wrong joint fit: sure heads on nearly collinear features in float32."""
    rng = torch.Generator().manual_seed(seed)
    classes, size = int(torch.randint(50, 101, (1,), generator=rng)), int(torch.randint(13, 17, (1,), generator=rng))
    labels = torch.randint(0, classes, (size,), generator=rng)
    images = np.load(shared_data / "cifar100.npz")["train_images"]
    chosen = torch.randperm(len(images), generator=rng)[:size].numpy()
    model = load_model("resnet20", {"classes": classes}, None, seed % 1000).eval()
    case = case_of(model, torch.from_numpy(images[chosen]).permute(0, 3, 1, 2).float() / 255, labels)
    found = dm.recover_features(case.exposure, "subspace", seed=seed)
    assert false_certificates(found, case) == 0
    assert bool(found.certified.any())
