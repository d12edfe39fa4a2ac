import pytest
import torch

from dosimeter.runs.reproduction.library import Library
from dosimeter.runs.reproduction.tables import Granted, Softening, parse_table
from dosimeter.runs.reproduction.trials import arbitrary_labels, client_of, draw_balanced, soften_labels, substitutions, trial_key
from dosimeter.types import Batch


@pytest.fixture
def library(tmp_path) -> Library:
    return Library(data=tmp_path, cache=tmp_path / "cache")


def row_of(small, **data):
    small["rows"] = [{"name": "x", "data": data}]
    return parse_table(small, "a/b").rows[0]


def test_a_trial_depends_on_its_seed_alone(small, library):
    row = row_of(small)
    first, again, other = (client_of(row, library, seed, "cpu") for seed in (1, 1, 2))
    assert torch.equal(first.batch.inputs, again.batch.inputs)
    assert first.description == again.description
    assert first.description["model_hash"] != other.description["model_hash"]
    assert first.description["batch_hash"] != other.description["batch_hash"]
    assert not first.model.training


def test_the_key_tells_settings_seeds_and_data_apart(small, library):
    rows = [row_of(small), row_of(small, batch_size=5), row_of(small, size=9)]
    keys = {trial_key(row, library, seed) for row in rows for seed in (0, 1)}
    assert len(keys) == 6
    assert trial_key(row_of(small), library, 0) in keys


def test_smoothing_and_mixup_blend_labels_and_pictures(rng):
    inputs = torch.rand(4, 1, 2, 2, generator=rng)
    batch = Batch(inputs, torch.tensor([0, 1, 2, 3]))
    smooth = soften_labels(batch, Softening(kind="smoothing", low=0.2, high=0.2), 4, rng)
    assert torch.allclose(smooth.targets, 0.8 * torch.eye(4) + 0.05)
    assert smooth.inputs is inputs
    mixed = soften_labels(batch, Softening(kind="mixup", low=0.7, high=0.7), 4, rng)
    assert torch.allclose(mixed.targets, torch.tensor([[0.7, 0, 0.3, 0], [0, 0.7, 0, 0.3]]))
    assert torch.allclose(mixed.inputs, 0.7 * inputs[:2] + 0.3 * inputs[2:])
    hard = soften_labels(batch, Softening(kind="one_hot"), 4, rng)
    assert torch.equal(hard.targets, torch.eye(4))


def test_mixup_within_a_class_is_refused(rng):
    with pytest.raises(ValueError, match="pairs of different classes"):
        soften_labels(Batch(torch.rand(2, 1, 2, 2), torch.tensor([1, 1])), Softening(kind="mixup"), 3, rng)


def test_a_mixed_trial_has_as_many_samples_as_asked_for(small, library):
    row = row_of(small, batch_size=1, sampler="unique", softening={"kind": "mixup"})
    targets = client_of(row, library, 0, "cpu").batch.targets
    assert targets.shape == (1, 10)
    assert (targets > 0).sum() == 2
    assert targets.sum() == pytest.approx(1.0)


def test_arbitrary_labels_show_each_class_and_ignore_the_images(small, library, rng):
    labels = arbitrary_labels(64, 20, 1000, rng)
    assert len(labels) == 64
    assert len(labels.unique()) == 20
    with pytest.raises(ValueError, match="at most 3 classes for 3 samples"):
        arbitrary_labels(3, 4, 10, rng)
    own, other = (client_of(row_of(small, batch_size=8, **data), library, 0, "cpu").batch for data in ({}, {"relabelled": 3}))
    assert torch.equal(own.inputs, other.inputs)
    assert len(other.targets.unique()) == 3


def test_auxiliary_samples_are_balanced_and_never_private(rng):
    labels = torch.tensor([0] * 10 + [1] * 3 + [2] * 10)
    taken = torch.tensor([0, 1, 10])
    chosen = draw_balanced(labels, 3, Granted(part="rest", per_class=5), taken, rng)
    assert labels[chosen].bincount().tolist() == [5, 2, 5]
    assert not torch.isin(chosen, taken).any()
    assert len(chosen.unique()) == len(chosen)
    assert labels[draw_balanced(labels, 3, Granted(total=4), taken, rng)].bincount().tolist() == [2, 2, 2]


def test_what_stood_in_and_what_was_scarce_is_said(small, library):
    row = row_of(small, name="mnist", stand_in="digits", auxiliary={"per_class": 100})
    said = substitutions(row, library)
    assert said[0] == "digits stood in for mnist, which is not at hand"
    assert "auxiliary samples a class in place of 100" in said[1]
    assert substitutions(row_of(small, name="digits", stand_in=None, auxiliary={"per_class": 5}), library) == []
