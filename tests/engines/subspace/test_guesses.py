"""Guesses behind defenses: marked, never in place of a proof, and closer than the published methods."""

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.interfaces import Exposure
from dosimeter.network.head import find_head
from dosimeter.network.probing import input_of
from dosimeter.types import Outcome

SIZE, CLASSES = 6, 80


def exposed(seed: int, *defenses, activation: type[nn.Module] = nn.ReLU, train: bool = True, **options) -> tuple[Exposure, Tensor, Tensor]:
    torch.manual_seed(seed)
    layers = (nn.Flatten(), nn.Linear(192, 150), nn.BatchNorm1d(150), activation(), nn.Linear(150, CLASSES))
    model = nn.Sequential(*layers).train(train)
    inputs, labels = torch.rand(SIZE, 3, 8, 8), torch.randperm(CLASSES)[:SIZE].sort().values
    exposure = dm.observe(model, dm.Batch(inputs, labels), defenses=defenses, seed=seed, **options)
    return exposure, input_of(model, find_head(exposure).name, inputs).double(), labels


def error(found, truth: Tensor) -> float:
    """The median over the batch, whose labels are distinct and in ascending order."""
    features = found.features.double()[found.labels.argsort()]
    difference = torch.linalg.vector_norm(features - truth, dim=1) / torch.linalg.vector_norm(truth, dim=1)
    return float(torch.nan_to_num(difference, nan=torch.inf).median())


NOISE = dm.defense("gaussian_noise", std=0.01)
STRONG = [NOISE, *(dm.defense("pruning", ratio=ratio) for ratio in (0.8, 0.99, 0.999)), dm.defense("quantisation", bits=2)]


@pytest.mark.parametrize("defense", STRONG, ids=str)
@pytest.mark.parametrize("seed", [0, 1])
def test_closer_than_rgla_and_quotient_with_the_same_labels(defense, seed):
    exposure, truth, labels = exposed(seed, defense)
    found = dm.recover_features(exposure, "subspace", labels=labels)
    assert torch.equal(found.labels.sort().values, labels)
    assert not bool(found.certified.any())
    assert found.outcome is Outcome.AMBIGUOUS
    assert "guesses are the most likely features" in found.message
    own = error(found, truth)
    assert own < error(dm.recover_features(exposure, "rgla", labels=labels, steps=1500, learning_rate=0.01), truth)
    assert own < error(dm.recover_features(exposure, "quotient", labels=labels), truth)


@pytest.mark.parametrize("kind", ["pooled", "sparse"])
@pytest.mark.parametrize("defense", STRONG[:4], ids=str)
def test_a_head_on_features_of_which_nothing_is_known(kind, defense):
    rng = torch.Generator().manual_seed(11)
    torch.manual_seed(11)
    drawn = torch.randn(SIZE, 256, generator=rng)
    features = (0.8 + 0.3 * drawn if kind == "pooled" else drawn).clamp_min(0)
    model, labels = nn.Linear(256, CLASSES), torch.randperm(CLASSES, generator=rng)[:SIZE].sort().values
    exposure = dm.observe(model, dm.Batch(features, labels), defenses=(defense,))
    own = error(dm.recover_features(exposure, "subspace", labels=labels), features.double())
    assert own < error(dm.recover_features(exposure, "rgla", labels=labels, steps=600, learning_rate=0.02), features.double())


def test_columns_that_soteria_took_out_are_filled_with_what_is_typical():
    exposure, truth, labels = exposed(2, dm.defense("soteria", ratio=0.4))
    found = dm.recover_features(exposure, "subspace", labels=labels)
    assert error(found, truth) < error(dm.recover_features(exposure, "quotient", labels=labels), truth)


def test_labels_are_read_off_the_rows():
    exposure, truth, labels = exposed(3, dm.defense("pruning", ratio=0.95))
    found = dm.recover_features(exposure, "subspace")
    assert torch.equal(found.labels, labels)
    assert error(found, truth) < 0.3


def test_an_undeclared_batch_size_is_read_off_the_rows():
    exposure, _, labels = exposed(4, NOISE, declare_batch_size=False)
    assert torch.equal(dm.recover_features(exposure, "subspace").labels, labels)


def test_features_of_either_sign():
    exposure, truth, labels = exposed(5, dm.defense("gaussian_noise", std=0.003), activation=nn.Tanh)
    found = dm.recover_features(exposure, "subspace")
    assert torch.equal(found.labels, labels)
    assert error(found, truth) < 0.1


def test_an_unknown_scale_is_found_from_the_bias():
    exposure, truth, labels = exposed(6, dm.defense("clipping", max_norm=0.5), dm.defense("gaussian_noise", std=1e-3))
    norm = sum(float(change.square().sum()) for change in exposure.update.values()) ** 0.5
    assert norm < 0.6  # it was clipped
    assert error(dm.recover_features(exposure, "subspace", labels=labels), truth) < 0.2


def test_what_is_proved_stays_as_it_is():
    exposure, truth, labels = exposed(7, dm.defense("gaussian_noise", std=1e-9))
    found = dm.recover_features(exposure, "subspace", labels=labels)
    assert len(found.features) == SIZE
    assert bool(found.certified.any())
    assert error(found, truth) < 1e-4


def test_nothing_is_guessed_without_a_distortion():
    exposure, _, _ = exposed(8)
    found = dm.recover_features(exposure, "subspace")
    assert found.complete
    assert "guesses" not in found.message


def test_an_empty_gradient_gives_no_guess():
    exposure, _, _ = exposed(9, NOISE)
    exposure.update.update({name: torch.zeros_like(change) for name, change in exposure.update.items()})
    assert len(dm.recover_features(exposure, "subspace").features) == 0
