"""GradViT: a vision transformer's gradient gives pictures, its priors by hand, and what it refuses."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.gradvit import ImagePrior, PatchJoins
from dosimeter.engines.matching.priors import batch_norms
from dosimeter.registry import MODELS


@pytest.fixture(scope="module")
def client():
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images[[3, 10]][:, None] / 16, dtype=torch.float32)
    torch.manual_seed(0)
    model = MODELS.build("vit", channels=1, size=8, patch=4, width=32, layers=2, heads=4).eval()
    return model, dm.Batch(images, torch.tensor(bunch.target[[3, 10]]))


def test_two_pictures_come_back_out_of_a_vision_transformer(client):
    model, batch = client
    found = dm.reconstruct(dm.observe(model, batch), "gradvit", labels=batch.targets, steps=500, seed=1)
    scores = dm.score(found, batch)
    assert found.outcome == dm.Outcome.COMPLETED
    assert float(scores["psnr"].min()) > 15
    foreign = dm.Batch(batch.inputs.flip(2).roll(2, 3), batch.targets)
    null = dm.score(dm.reconstruct(dm.observe(model, foreign), "gradvit", labels=batch.targets, steps=500, seed=1), batch)
    assert float(scores["psnr"].median()) > float(null["psnr"].median()) + 5


def test_the_patch_prior_by_hand():
    ramp = torch.arange(6.0).repeat(6, 1)[None, None] ** 2  # differences 1, 3, 5, 7, 9 along a row, none down a column
    assert float(PatchJoins(weight=1, patch=2)(ramp, {})) == (3 + 7) / 2
    assert float(PatchJoins(weight=1, patch=3)(ramp, {})) == 5
    assert float(PatchJoins(weight=1, patch=6)(ramp, {})) == 0


def test_the_image_prior_vanishes_where_the_network_kept_these_pictures(client):
    _, batch = client
    torch.manual_seed(1)
    network = MODELS.build("resnet8", channels=1, size=8)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = None  # the running statistics are those of the one batch seen
    network.train()(batch.inputs)
    network.eval()
    plain = dm.Normalization()
    prior = ImagePrior(weight=1.0, network=network, own=plain, theirs=plain)
    noise = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    at_home = float(prior(batch.inputs, {}))
    assert at_home < 0.5 * float(prior(noise, {}))
    name, (mean, _, unit) = next(iter(batch_norms(network).items()))
    first = network.get_submodule(name.replace("bn", "conv"))(batch.inputs).mean((0, 2, 3))
    assert float(((first - mean) / unit).norm()) < 1e-5  # by hand, at the first norm


def test_the_network_is_read_and_one_without_norms_refused(client, tmp_path):
    model, batch = client
    exposure = dm.observe(model, batch)
    with pytest.raises(dm.Refused, match="batch norms"):
        dm.reconstruct(exposure, "gradvit", labels=batch.targets, steps=1, network="fcn3")
    with pytest.raises((FileNotFoundError, ValueError)):
        dm.reconstruct(exposure, "gradvit", labels=batch.targets, steps=1, network="resnet8", network_weights=str(tmp_path / "none.pt"))


def test_labels_and_a_model_of_patches_are_needed(client):
    model, batch = client
    with pytest.raises(dm.Refused, match="needs labels"):
        dm.reconstruct(dm.observe(model, batch), "gradvit", steps=1)
    other = MODELS.build("small_cnn", channels=1, size=8)
    with pytest.raises(dm.Refused, match="patches"):
        dm.reconstruct(dm.observe(other, batch), "gradvit", labels=batch.targets, steps=1)
    assert dm.reconstruct(dm.observe(other, batch), "gradvit", labels=batch.targets, steps=1, patch=4).outcome == dm.Outcome.COMPLETED
