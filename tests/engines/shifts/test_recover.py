"""Maps of a whole batch from one convolution's gradient: exact and certified on real digits, refused where channels do not suffice."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm


def small_net(norm: str) -> nn.Module:
    """Two strided convolutions down to a grid of 2 by 2, then two that keep it, each with 48 channels."""

    def block(inputs: int, stride: int) -> list[nn.Module]:
        norms = {"batch": nn.BatchNorm2d(48), "group": nn.GroupNorm(4, 48), "none": nn.Identity()}
        return [nn.Conv2d(inputs, 48, 3, stride, 1, bias=norm == "none"), norms[norm], nn.ReLU()]

    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [*block(1, 2), *block(48, 2), *block(48, 1), *block(48, 1)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10))


def true_inputs(model: nn.Module, layer: str, inputs: torch.Tensor) -> torch.Tensor:
    return model[: int(layer)](inputs).detach().double()


@pytest.mark.parametrize(("norm", "mode"), [("batch", "eval"), ("batch", "train"), ("group", "eval"), ("none", "eval")])
@pytest.mark.parametrize("samples", [1, 5])
def test_every_sample_is_certified_and_right_within_its_bar(digits, norm, mode, samples):
    images, labels = digits
    model = small_net(norm).train(mode == "train")
    if mode == "train" and samples == 1:
        pytest.skip("batch norm in train mode needs more than one sample to say anything")
    exposure = dm.observe(model, dm.Batch(images[20 : 20 + samples], labels[20 : 20 + samples]), declare_batch_size=False)
    found = dm.recover_maps(exposure)
    assert found.batch_size == samples
    assert found.certified.all()
    truth = true_inputs(small_net(norm).train(mode == "train"), found.layer, images[20 : 20 + samples])
    distances, partners = torch.cdist(found.maps.flatten(1), truth.flatten(1)).min(1)
    assert sorted(partners.tolist()) == list(range(samples))
    errors = distances / truth.flatten(1).norm(dim=1)[partners]
    assert (errors < 1e-3).all()
    assert (errors < found.error_bars + 1e-6).all()


def test_too_many_samples_for_the_channels_are_refused_with_the_reason(digits):
    images, labels = digits
    exposure = dm.observe(small_net("none").eval(), dm.Batch(images[:13], labels[:13]))
    with pytest.raises(dm.Refused, match="room for at most 12 samples: 13 samples have 52 positions"):
        dm.recover_maps(exposure)
    with pytest.raises(dm.Refused, match="no gradient of a layer 'nowhere'"):
        dm.recover_maps(exposure, layer="nowhere")


@pytest.mark.parametrize(
    ("name", "options", "certified"),
    [
        ("soteria", {"ratio": 0.5}, False),  # does not say what it does to this layer
        ("clipping", {"max_norm": 1e-3, "mode": "layer"}, False),  # each layer by its own factor: the scale of the maps is lost
        ("clipping", {"max_norm": 1e-3}, True),  # one factor for all layers leaves the scale of the maps as it is
        ("quantisation", {"bits": 24}, True),
        ("gaussian_noise", {"std": 1e-7}, True),
        ("laplace_noise", {"scale": 1e-7}, True),
        ("pruning", {"ratio": 0.02}, True),
    ],
)
def test_a_defense_that_says_what_it_does_leaves_certificates_with_wider_bars(digits, name, options, certified):
    images, labels = digits
    model, batch = small_net("none").eval(), dm.Batch(images[:4], labels[:4])
    found = dm.recover_maps(dm.observe(model, batch, defenses=(dm.defense(name, **options),)))
    assert found.batch_size == 4
    assert found.certified.tolist() == [certified] * 4
    assert (name in found.message) != certified
    if certified:
        truth = true_inputs(model, found.layer, batch.inputs).flatten(1)
        distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
        assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()
        assert any(name in premise for premise in found.premises)


def test_noise_that_hides_a_direction_is_refused(digits):
    images, labels = digits
    noise = dm.defense("gaussian_noise", std=1e-2)
    with pytest.raises(dm.Refused, match="stand above the noise"):
        dm.recover_maps(dm.observe(small_net("none").eval(), dm.Batch(images[:4], labels[:4]), defenses=(noise,)))


def test_noise_that_nobody_declares_shows_as_a_white_tail(digits):
    images, labels = digits
    model, batch = small_net("none").eval(), dm.Batch(images[:4], labels[:4])
    exposure = dm.observe(model, batch, defenses=(dm.defense("gaussian_noise", std=1e-7),))
    found = dm.recover_maps(replace(exposure, public=replace(exposure.public, defenses=())))
    truth = true_inputs(model, found.layer, batch.inputs).flatten(1)
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert found.certified.all()
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()


def test_an_image_that_occurs_twice_counts_once_and_a_declared_size_says_so(digits):
    images, labels = digits
    model, batch = small_net("none").eval(), dm.Batch(images[[0, 1, 2, 1]], labels[[0, 1, 2, 1]])
    open_size = dm.recover_maps(dm.observe(model, batch, declare_batch_size=False))
    assert open_size.batch_size == 3
    assert open_size.certified.all()
    assert any("smallest batch" in premise for premise in open_size.premises)
    declared = dm.recover_maps(dm.observe(model, batch))
    assert declared.batch_size == 3
    assert not declared.certified.any()
    assert "3 maps explain the gradient of 4 samples" in declared.message


def test_a_hidden_linear_layer_is_a_grid_of_one_position(digits):
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()
    found = dm.recover_maps(dm.observe(model, dm.Batch(images[:9], labels[:9]), declare_batch_size=False))
    assert (found.layer, found.batch_size) == ("3", 9)
    assert found.certified.all()
    truth = model[:3](images[:9]).detach().double()
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == list(range(9))
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars).all()
    first, second = found.layers
    assert "can be negative" in first.reason  # it receives the images, and with ten classes nine features are not proved
    assert (second.seen, second.channels, second.reason) == (9, 256, "")
    assert second.gap > 100
    assert any("no batch size is declared" in premise for premise in found.premises)


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        (3, {"padding": 0}),
        (3, {"padding": 2}),
        (3, {"padding": 1, "stride": 2}),
        (1, {"padding": 1, "groups": 2}),
    ],
    ids=str,
)
def test_layers_without_padding_with_strides_and_with_groups_are_read(digits, samples, options):
    images, labels = digits
    side = 3 if options["padding"] == 2 else 5 if "stride" in options else 4
    with torch.random.fork_rng():
        torch.manual_seed(4)
        stem = nn.Conv2d(1, 64, 9 - side)
        model = nn.Sequential(stem, nn.ReLU(), nn.Conv2d(64, 80, 3, **options), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10)).eval()
        model(images[:1])
    exposure = dm.observe(model, dm.Batch(images[30 : 30 + samples], labels[30 : 30 + samples]), declare_batch_size=False)
    found = dm.recover_maps(exposure, layer="2")
    assert found.certified.tolist() == [True] * samples
    truth = true_inputs(model, "2", images[30 : 30 + samples]).flatten(1)
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == list(range(samples))
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars.clamp_max(1e-3)).all()


def test_several_samples_of_a_grouped_layer_are_refused_since_each_group_has_its_own_order(digits):
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(4)
        read = nn.Conv2d(64, 80, 3, padding=1, groups=2)
        model = nn.Sequential(nn.Conv2d(1, 64, 6), nn.ReLU(), read, nn.ReLU(), nn.Flatten(), nn.Linear(720, 10)).eval()
    for declared in (True, False):
        exposure = dm.observe(model, dm.Batch(images[:2], labels[:2]), declare_batch_size=declared)
        with pytest.raises(dm.Refused, match="an order of its own"):
            dm.recover_maps(exposure, layer="2")


def test_a_batch_of_20_samples_comes_out_of_a_hidden_linear_layer(digits):
    """Samples that agree in most units have wide cones between them: the search climbs to edges with more and more zeros."""
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(5)
        hidden = (nn.Flatten(), nn.Linear(64, 480), nn.ReLU(), nn.Linear(480, 480), nn.ReLU())
        model = nn.Sequential(*hidden, nn.Linear(480, 10)).eval()
    exposure = dm.observe(model, dm.Batch(images[40:60], labels[40:60]), declare_batch_size=False)
    found = dm.recover_maps(exposure, layer="3")
    assert found.certified.tolist() == [True] * 20
    truth = true_inputs(model, "3", images[40:60])
    distances, partners = torch.cdist(found.maps.flatten(1), truth).min(1)
    assert sorted(partners.tolist()) == list(range(20))
    assert (distances / truth.norm(dim=1)[partners] < found.error_bars.clamp_max(1e-3)).all()
