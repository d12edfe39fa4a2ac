"""RGLA: pictures of features, the law of duplicates, refinement, and (slow) the shape of Tables 8 and 10 on a smaller twin."""

import pytest
import torch

import dosimeter as dm
from dosimeter.types import Refused


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "decoders"))


@pytest.fixture
def setting(normed_classifier, digits):
    images, labels = digits
    batch = dm.Batch(images[:5], torch.tensor([3, 3, 3, 8, 1]))
    auxiliary = dm.Batch(images[500:900], labels[500:900])
    return batch, dm.observe(normed_classifier.eval(), batch, auxiliary=auxiliary, declare_batch_size=False)


OPTIONS = {"features": "subspace", "width": 16, "epochs": 8}


def psnr(found, batch, exposure):
    return dm.score(found, batch, exposure=exposure)["psnr"]


def test_exact_features_are_drawn_as_the_true_ones_are(setting):
    """Without labels and batch size: what comes back is what the decoder draws from the client's own features."""
    from dosimeter.generators.keeping import obtain
    from dosimeter.generators.train import DecoderSettings, decode_without_slope

    batch, exposure = setting
    found = dm.reconstruct(exposure, "rgla", **OPTIONS)
    target, trained = obtain(exposure, DecoderSettings(width=16, epochs=8), None)
    ideal = decode_without_slope(trained.decoder, target.features(batch.inputs))
    assert found.labels.sort().values.tolist() == [1, 3, 3, 3, 8]
    nearest = torch.cdist(ideal.flatten(1), found.inputs.flatten(1)).amin(1)
    assert float(nearest.max()) < 1e-2


def test_the_gradient_and_not_the_decoder_makes_the_picture(setting):
    batch, exposure = setting
    scores = dm.score(dm.reconstruct(exposure, "rgla", **OPTIONS), batch, exposure=exposure)
    best = torch.stack([null["psnr"] for null in scores.nulls.values()]).amax(0)
    assert {"mean", "nearest", "foreign features", "mean feature", "shuffled features"} == set(scores.nulls)
    assert float((scores["psnr"] - best).median()) > 3


def test_refinement_and_the_joint_one_come_nearer(setting):
    batch, exposure = setting
    plain = psnr(dm.reconstruct(exposure, "rgla", **OPTIONS), batch, exposure)
    refined = psnr(dm.reconstruct(exposure, "rgla", refinement_steps=100, **OPTIONS), batch, exposure)
    assert float((refined - plain).median()) > 6
    jointly = dm.reconstruct(exposure, "rgla", joint_steps=30, **OPTIONS)
    assert jointly.distance is not None
    assert float((psnr(jointly, batch, exposure) - plain).median()) > 0


def test_the_published_recovery_feeds_the_same_decoder(setting):
    batch, exposure = setting
    found = dm.reconstruct(exposure, "rgla", features="rgla", steps=3, labels=batch.targets, width=16, epochs=8)
    assert found.labels.tolist() == batch.targets.tolist()


def test_refusals(setting, classifier, digits, tmp_path):
    batch, exposure = setting
    with pytest.raises(Refused, match="needs labels"):
        dm.reconstruct(exposure, "rgla", features="rgla", width=16, epochs=8)
    with pytest.raises(FileNotFoundError, match="no file"):
        dm.reconstruct(exposure, "rgla", decoder=str(tmp_path / "none.safetensors"), **OPTIONS)
    other = dm.observe(classifier, batch, auxiliary=exposure.auxiliary)
    from dosimeter.generators.keeping import obtain
    from dosimeter.generators.train import DecoderSettings

    _, trained = obtain(exposure, DecoderSettings(width=16, epochs=8), None)
    with pytest.raises(Refused, match="but this model makes"):
        dm.reconstruct(other, "rgla", decoder=str(trained.path), **OPTIONS)
    with pytest.raises(ValueError, match="expected one of 'rgla', 'subspace'"):
        dm.attack("rgla", features="quotient")
