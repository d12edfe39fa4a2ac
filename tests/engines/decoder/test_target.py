"""What a decoder learns from: the head's input in the client's mode, and a fingerprint of what it depends on."""

import copy

import pytest
import torch
from torch import nn

from dosimeter.engines.decoder.target import Target
from dosimeter.models.loading import load_model
from dosimeter.types import Normalization, Refused


def target_of(model, shape=(1, 8, 8), normalization=None):
    return Target.from_model(model, shape, normalization or Normalization())


def test_feature_shapes_with_and_without_pooling(classifier, normed_classifier):
    assert target_of(classifier).feature_shape == (12, 1, 1)
    assert target_of(normed_classifier).feature_shape == (4, 8, 8)
    options = {"classes": 10, "size": 32}
    pooled = load_model("resnet18", options, None, 0)
    whole = load_model("resnet18", options | {"pooling": False}, None, 0)
    assert target_of(pooled, (3, 32, 32)).feature_shape == (512, 1, 1)
    assert target_of(whole, (3, 32, 32)).feature_shape == (512, 4, 4)


@pytest.mark.parametrize("train_mode", [True, False])
def test_features_are_the_heads_input_in_the_clients_mode(normed_classifier, digits, train_mode):
    model = normed_classifier.train(train_mode)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.uniform_()
    scale = Normalization(mean=(0.3,), std=(0.5,))
    images = digits[0][:6]
    before = copy.deepcopy(model.state_dict())
    found = target_of(model, normalization=scale).features(images)
    expected = copy.deepcopy(model)[:4]((images - 0.3) / 0.5)
    assert torch.allclose(found, expected, atol=1e-6)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_in_train_mode_images_lie_in_batches_of_the_size_asked_for(normed_classifier, digits):
    view = target_of(normed_classifier.train())
    images = digits[0][:12]
    expected = torch.cat([view.features(piece) for piece in images.split(4)])
    assert torch.allclose(view.features_in_batches(images, 4), expected, atol=1e-6)
    assert not torch.allclose(expected, view.features(images), atol=1e-3)
    rest = torch.cat([view.features(images[:8]), view.features(images[8:11])])
    assert torch.allclose(view.features_in_batches(images[:11], 8), rest, atol=1e-6)
    joined = torch.cat([view.features(images[:4]), view.features(images[4:9])])  # a single one goes with the batch before it
    assert torch.allclose(view.features_in_batches(images[:9], 4), joined, atol=1e-6)
    assert torch.equal(view.features_in_batches(images, 99), view.features(images))
    alone = view.features(images[:1])  # which batch norm takes for itself
    assert torch.allclose(alone, view.features(images[:1].repeat(2, 1, 1, 1))[:1])


def test_the_fingerprint_sees_the_backbone_and_the_mode_but_not_the_head(normed_classifier):
    model = normed_classifier.eval()
    first = target_of(model).fingerprint()
    nn.init.normal_(model[4].weight)
    assert target_of(model).fingerprint() == first
    assert target_of(copy.deepcopy(model).train()).fingerprint() != first
    assert target_of(model, normalization=Normalization(mean=(0.1,))).fingerprint() != first
    statistics = copy.deepcopy(model)
    statistics[1].running_var.mul_(2)
    assert target_of(statistics).fingerprint() != first
    changed = copy.deepcopy(model)
    with torch.no_grad():
        changed[0].weight[0, 0, 0, 0] += 1e-6
    assert target_of(changed).fingerprint() != first


def test_running_statistics_do_not_matter_in_train_mode(normed_classifier):
    model = normed_classifier.train()
    first = target_of(model).fingerprint()
    model[1].running_var.mul_(2)
    assert target_of(model).fingerprint() == first


def test_smaller_images_are_scaled_up_and_inputs_without_an_image_are_refused(classifier):
    assert target_of(classifier).images(torch.rand(2, 1, 4, 4)).shape == (2, 1, 8, 8)
    with pytest.raises(Refused, match="draws images"):
        target_of(nn.Linear(9, 3), (9,))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_model_in_half_precision_is_looked_through_in_single(dtype):
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 3)).eval().to(dtype)
    target = Target.from_model(model, (1, 8, 8), Normalization())
    images = target.images(torch.rand(2, 1, 8, 8))
    rounded = copy.deepcopy(model).float()[:3](images)
    torch.testing.assert_close(target.features(images), rounded)
    assert next(model.parameters()).dtype == dtype
