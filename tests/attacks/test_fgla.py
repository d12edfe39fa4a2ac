"""FGLA: exact for one sample, one picture for samples of one label, and what it does without labels."""

import pytest
import torch

import dosimeter as dm
from dosimeter.types import Refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


@pytest.fixture
def expose(normed_classifier, digits):
    images, labels = digits

    def observed(indices, given=None):
        batch = dm.Batch(images[indices], labels[indices] if given is None else torch.tensor(given))
        return batch, dm.observe(normed_classifier.eval(), batch, auxiliary=dm.Batch(images[500:800], labels[500:800]))

    return observed


OPTIONS = {"width": 16, "epochs": 8}


def test_one_sample_is_drawn_from_its_exact_feature(expose):
    """Of one sample fgla's quotient is its feature, so that fgla and rgla draw the same picture."""
    batch, exposure = expose([7])
    found = dm.reconstruct(exposure, "fgla", labels=batch.targets, **OPTIONS)
    same = dm.reconstruct(exposure, "rgla", features="subspace", **OPTIONS)
    assert torch.allclose(found.inputs, same.inputs, atol=1e-3)


def test_samples_of_one_label_come_back_as_one_picture(expose):
    batch, exposure = expose([0, 1, 2, 3], given=[5, 5, 5, 2])
    found = dm.reconstruct(exposure, "fgla", labels=batch.targets, **OPTIONS)
    same = found.inputs[found.labels == 5]
    assert len(same) == 3
    assert torch.equal(same[0], same[1])
    assert torch.equal(same[0], same[2])
    apart = dm.reconstruct(exposure, "rgla", features="subspace", **OPTIONS)
    errors = [float(dm.score(result, batch, exposure=exposure)["mse"].mean()) for result in (found, apart)]
    assert errors[1] < 0.5 * errors[0]


def test_without_labels_the_present_classes_are_read_off_the_bias(expose):
    batch, exposure = expose([0, 1, 2], given=[4, 7, 1])
    found = dm.reconstruct(exposure, "fgla", **OPTIONS)
    assert found.labels.tolist() == [1, 4, 7]
    given = dm.reconstruct(exposure, "fgla", labels=batch.targets.sort().values, **OPTIONS)
    assert torch.equal(found.inputs, given.inputs)


def test_a_bias_gradient_of_zero_is_told_and_no_crash(expose):
    batch, exposure = expose([0, 1, 2], given=[4, 7, 1])
    exposure.update["4.bias"].zero_()
    found = dm.reconstruct(exposure, "fgla", labels=batch.targets, **OPTIONS)
    assert "divide by zero" in found.message
    assert found.inputs.isfinite().all()


def test_refusals(expose, normed_classifier, digits):
    batch, exposure = expose([0, 1])
    with pytest.raises(Refused, match="fgla needs auxiliary data"):
        dm.reconstruct(dm.observe(normed_classifier.eval(), batch), "fgla", labels=batch.targets)
    exposure.update.pop("4.bias")
    with pytest.raises(Refused, match="fgla needs the head bias gradient"):
        dm.reconstruct(exposure, "fgla", labels=batch.targets, **OPTIONS)
