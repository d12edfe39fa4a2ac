import pytest
import torch

from dosimeter.attacks.gradfilt import GradFilt
from dosimeter.runs.measurement import Measurement
from dosimeter.runs.reproduction.tables import Targets
from dosimeter.runs.reproduction.targets import aim_at, draw_with_targets

LABELS = torch.arange(40) % 4


@pytest.mark.parametrize(("classes", "number"), [("one", 1), ("own", 3)])
def test_only_the_target_samples_have_the_target_classes(rng, classes, number):
    drawn = draw_with_targets(LABELS, 4, Targets(count=3, classes=classes), 8, rng)
    is_target = torch.isin(drawn.labels, torch.tensor(drawn.classes))
    assert is_target.nonzero().flatten().tolist() == list(drawn.positions)
    assert (len(drawn.positions), len(drawn.classes), len(drawn.labels)) == (3, number, 8)
    assert torch.equal(LABELS[drawn.indices], drawn.labels)
    assert len(drawn.indices.unique()) == 8


def test_a_class_with_too_few_images_is_filled_up_by_relabelled_ones(rng):
    labels = torch.tensor([0] * 2 + [1] * 2)
    drawn = draw_with_targets(labels, 2, Targets(count=3), 6, rng)
    assert torch.bincount(drawn.labels, minlength=2).sort().values.tolist() == [3, 3]
    assert len(drawn.indices[list(drawn.positions)].unique()) == 3


def test_targets_fill_no_whole_batch(rng):
    with pytest.raises(ValueError, match=r"targets.count: expected fewer than"):
        draw_with_targets(LABELS, 4, Targets(count=3), 3, rng)


def test_the_drawn_classes_become_the_targets_of_methods_that_have_some():
    measurement = aim_at(Measurement(labels="optimised", method=GradFilt(targets=())), (2, 5))
    assert isinstance(measurement.method, GradFilt)
    assert (measurement.method.targets, measurement.labels) == ((2, 5), "optimised")
