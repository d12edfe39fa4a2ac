"""The defenses of the data: mixup, instahide, pixelation, blur, label_smoothing and random_labels."""

import math
from dataclasses import replace

import numpy
import pytest
import torch
from scipy import ndimage
from torch import nn

import dosimeter as dm
from dosimeter.losses import BinaryCrossEntropy, CrossEntropy
from dosimeter.randomness import generator
from dosimeter.types import Client


@pytest.fixture
def client(classifier, batch) -> Client:
    return Client(model=classifier, batch=batch, training=dm.FedSGD(), loss=CrossEntropy())


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


def test_mixup_blends_inputs_and_labels_alike(client):
    identity = torch.eye(6).view(6, 1, 1, 6)  # the blend of unit vectors is its coefficients
    images = nn.functional.pad(identity, (0, 2, 0, 7))
    mixed = _defended(replace(client, batch=dm.Batch(images, torch.arange(6))), "mixup", seed=3).batch
    coefficients = mixed.inputs[:, 0, 0, :6]
    assert torch.allclose(coefficients, mixed.targets[:, :6], atol=1e-6)
    assert torch.allclose(mixed.targets.sum(1), torch.ones(6))
    assert ((coefficients > 0).sum(1) <= 2).all()
    assert (coefficients.diagonal() < 1).any()


def test_mixup_shares_follow_the_beta_distribution():
    shares = dm.defense("mixup", alpha=0.4)._shares(20_000, generator(4, "shares"))
    assert shares.mean().item() == pytest.approx(0.5, abs=0.02)
    assert shares.var().item() == pytest.approx(1 / (4 * (2 * 0.4 + 1)), rel=0.05)


def test_mixup_of_one_sample_is_refused(client, batch):
    with pytest.raises(dm.Refused, match=r"mixup blends pairs of samples"):
        _defended(replace(client, batch=dm.Batch(batch.inputs[:1], batch.targets[:1])), "mixup")


@pytest.mark.parametrize(("images", "largest"), [(2, 0.65), (4, 0.65), (6, 0.17)])
def test_instahide_coefficients_sum_to_one_and_none_is_too_large(images, largest):
    mixing = dm.defense("instahide", images=images, largest=largest).mixing_matrix(6, generator(5, "mixing"))
    assert torch.allclose(mixing.sum(1), torch.ones(6, dtype=torch.float64))
    assert ((mixing > 0).sum(1) == images).all()
    assert (mixing.diagonal() > 0).all()
    assert mixing.max() <= largest + 1e-12


def test_instahide_magnitudes_are_those_of_the_blend_and_half_the_signs_flip(client):
    identity = nn.functional.pad(torch.eye(6).view(6, 1, 1, 6), (0, 2, 0, 7))
    hidden = _defended(replace(client, batch=dm.Batch(identity, torch.arange(6))), "instahide", images=3).batch
    coefficients = hidden.inputs[:, 0, 0, :6]
    assert torch.allclose(coefficients.abs(), hidden.targets[:, :6], atol=1e-6)
    constant = replace(client, batch=dm.Batch(torch.ones(6, 1, 8, 8), torch.arange(6)))
    assert abs(_defended(constant, "instahide", images=3).batch.inputs.mean().item()) < 0.2


def test_instahide_needs_enough_samples_and_a_possible_ceiling(client):
    with pytest.raises(dm.Refused, match=r"instahide blends 7 samples; this batch has 6"):
        _defended(client, "instahide", images=7)
    with pytest.raises(ValueError, match=r"defense\.largest: expected more than 1/2"):
        dm.defense("instahide", images=2, largest=0.5)


@pytest.mark.parametrize("block", [2, 3, 5, 8, 11])
def test_pixelation_averages_each_block(client, block):
    found = _defended(client, "pixelation", block=block).batch.inputs
    for top in range(0, 8, block):
        for left in range(0, 8, block):
            square = (..., slice(top, top + block), slice(left, left + block))
            expected = client.batch.inputs[square].mean((-2, -1), keepdim=True)
            assert torch.allclose(found[square], expected.expand_as(found[square]), atol=1e-6)


@pytest.mark.parametrize("sigma", [0.5, 1.3, 4.0])
def test_blur_agrees_with_scipy(client, sigma):
    found = _defended(client, "blur", sigma=sigma).batch.inputs.numpy()
    radius = math.ceil(4 * sigma)
    expected = ndimage.gaussian_filter(client.batch.inputs.numpy(), (0, 0, sigma, sigma), mode="nearest", radius=(0, 0, radius, radius))
    assert numpy.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), [("blur", {"sigma": 1.0}), ("pixelation", {"block": 2})])
def test_inputs_that_are_not_images_are_refused(client, name, options):
    flat = replace(client, batch=dm.Batch(torch.rand(4, 64), torch.arange(4)))
    with pytest.raises(dm.Refused, match=rf"{name} needs images \(channels, height, width\); these inputs have shape \(64,\)"):
        _defended(flat, name, **options)


@pytest.mark.parametrize("convention", ["pytorch", "thesis"])
def test_label_smoothing_is_the_smoothed_loss(classifier, batch, convention):
    behind = dm.observe(classifier, batch, defenses=(dm.defense("label_smoothing", smoothing=0.3, convention=convention),)).update
    direct = dm.observe(classifier, batch, loss=CrossEntropy(smoothing=0.3, convention=convention)).update
    assert all(torch.equal(behind[name], direct[name]) for name in direct)


def test_label_smoothing_agrees_with_pytorch(classifier, batch):
    classifier.zero_grad()
    nn.CrossEntropyLoss(label_smoothing=0.3)(classifier(batch.inputs), batch.targets).backward()
    sent = dm.observe(classifier, batch, defenses=(dm.defense("label_smoothing", smoothing=0.3),)).update
    assert torch.allclose(sent["5.weight"], classifier[5].weight.grad, atol=1e-6)


def test_label_smoothing_softens_the_targets_of_other_losses(client):
    soft = _defended(replace(client, loss=BinaryCrossEntropy()), "label_smoothing", smoothing=0.5).batch.targets
    expected = torch.full((6, 10), 0.05)
    expected[torch.arange(6), client.batch.targets] = 0.55
    assert torch.allclose(soft, expected)


def test_random_labels_stay_with_the_probability_of_their_epsilon(client):
    labels = torch.full((30_000,), 7)
    many = replace(client, batch=dm.Batch(torch.zeros(30_000, 1, 8, 8), labels))
    answered = _defended(many, "random_labels", epsilon=2.0).batch.targets
    shares = torch.bincount(answered, minlength=10) / 30_000
    keep = math.exp(2) / (math.exp(2) + 9)
    assert shares[7].item() == pytest.approx(keep, abs=0.01)
    others = shares[torch.arange(10) != 7]
    assert torch.allclose(others, torch.full((9,), (1 - keep) / 9), atol=0.006)
    assert math.log(shares[7] / others.mean()) == pytest.approx(2.0, abs=0.05)


def test_random_labels_of_soft_targets_are_refused(client):
    soft = replace(client, batch=dm.Batch(client.batch.inputs, torch.full((6, 10), 0.1)))
    with pytest.raises(dm.Refused, match=r"random_labels randomises class ids; this batch has soft labels"):
        _defended(soft, "random_labels", epsilon=1.0)


def test_a_yes_or_no_question_is_answered_at_random(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    client = Client(
        model=model,
        batch=dm.Batch(torch.zeros(4000, 1, 8, 8), torch.ones(4000, dtype=torch.int64)),
        training=dm.FedSGD(),
        loss=BinaryCrossEntropy(),
    )
    assert _defended(client, "random_labels", epsilon=0.0).batch.targets.float().mean().item() == pytest.approx(0.5, abs=0.04)
