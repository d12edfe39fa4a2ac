"""SAPAG, GradInversion and the stepwise attack: each recovers, keeps to its schedule and refuses what it cannot use."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.registry import MODELS


def digits(*chosen: int) -> dm.Batch:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = torch.tensor(bunch.images[list(chosen)][:, None] / 16, dtype=torch.float32)
    return dm.Batch(images, torch.tensor(bunch.target[list(chosen)]))


def network(norm: bool, seed: int = 0) -> nn.Module:
    """Three blocks without pooling, so that a short run already shows what is there."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        norms = [nn.BatchNorm2d(12) if norm else nn.Identity() for _ in range(3)]
        blocks = [nn.Sequential(nn.Conv2d(i, 12, 3, padding=1), n, nn.ReLU()) for i, n in zip((1, 12, 12), norms)]
        return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(768, 10)).eval()


def gain_over_grey(found: dm.Reconstruction, batch: dm.Batch) -> float:
    """Decibels above the best constant image."""
    error = (found.inputs - batch.inputs).square().mean()
    return float(10 * ((batch.inputs - batch.inputs.mean()).square().mean() / error).log10())


@pytest.mark.parametrize(
    ("attack", "options"),
    [
        ("sapag", {"steps": 150}),
        ("gradinversion", {"steps": 80, "restarts": 2, "total_variation": 1e-4, "batch_norm": 1e-5, "consistency": 1e-3}),
        ("stepwise", {"steps": 150, "total_variation": 1e-4, "batch_norm": 1e-6}),
        ("stepwise", {"steps": 150, "variant": "paper", "total_variation": 1e-4, "batch_norm": 1e-6}),
    ],
)
def test_one_digit_comes_back_well_above_a_constant_image(attack: str, options: dict) -> None:
    batch = digits(3)
    exposure = dm.observe(network(norm=True), batch)
    found = dm.reconstruct(exposure, attack, labels=batch.targets, **options)
    assert found.outcome == dm.Outcome.COMPLETED
    assert gain_over_grey(found, batch) > 5
    foreign = dm.reconstruct(dm.observe(network(norm=True), digits(40)), attack, labels=batch.targets, **options)
    assert gain_over_grey(foreign, batch) < 2


def test_sapag_finds_its_own_labels_where_none_are_given() -> None:
    batch = digits(3)
    found = dm.reconstruct(dm.observe(network(norm=False), batch), "sapag", steps=200)
    assert int(found.labels.argmax()) == int(batch.targets)


def test_sapags_distance_is_bounded_by_the_number_of_layers() -> None:
    batch = digits(3, 4)
    exposure = dm.observe(network(norm=False), batch)
    wide, narrow = (dm.reconstruct(exposure, "sapag", labels=batch.targets, steps=1, width=width).distance for width in (10.0, 1e-6))
    assert wide is not None
    assert narrow is not None
    assert wide < narrow <= len(exposure.update)


def test_stepwise_works_without_batch_norm_and_never_matches_the_stem() -> None:
    batch = digits(3)
    exposure = dm.observe(network(norm=False), batch)
    found = dm.reconstruct(exposure, "stepwise", labels=batch.targets, steps=40, total_variation=0.0)
    update = exposure.public.training(exposure.model, found.inputs, batch.targets, exposure.public.loss)
    assert found.distance is not None
    vectors = [torch.cat([source[name].flatten() for name in exposure.update]) for source in (update, exposure.update)]
    assert found.distance == pytest.approx(1 - float(torch.cosine_similarity(*vectors, dim=0)), abs=1e-5)


def test_the_printed_equation_weighs_a_sum_and_the_maps_own_units() -> None:
    batch = digits(3)
    exposure = dm.observe(network(norm=True), batch)
    weights = {"steps": 2, "total_variation_onset": 0.0, "batch_norm_onset": 0.0, "dropout": 0.0, "batch_norm": 0.0, "layer_shares": 1}
    paper, printed = (
        dm.reconstruct(exposure, "stepwise", labels=batch.targets, variant=variant, total_variation=0.01, seed=3, **weights)
        for variant in ("paper", "printed")
    )

    def variation(inputs: torch.Tensor) -> float:
        down, right = inputs.diff(dim=-2)[..., :-1], inputs.diff(dim=-1)[..., :-1, :]
        return float((down.square() + right.square()).sum())

    assert paper.objective - paper.distance == pytest.approx(0.01 * variation(paper.inputs) / 49, rel=1e-3)
    assert printed.objective - printed.distance == pytest.approx(0.01 * variation(printed.inputs), rel=1e-3)


def test_stepwise_matches_the_blocks_that_are_named_and_refuses_others() -> None:
    batch = digits(3)
    exposure = dm.observe(MODELS.build("resnet8", channels=1, size=8).eval(), batch)
    options = {"steps": 2, "total_variation": 0.0, "batch_norm": 0.0, "dropout": 0.0}
    found = dm.reconstruct(exposure, "stepwise", labels=batch.targets, blocks=(2,), **options)
    update = exposure.public.training(exposure.model, found.inputs, batch.targets, exposure.public.loss)
    names = [name for name in exposure.update if name.startswith("layer2")]
    vectors = [torch.cat([source[name].flatten() for name in names]) for source in (update, exposure.update)]
    assert found.distance == pytest.approx(1 - float(torch.cosine_similarity(*vectors, dim=0)), abs=1e-5)
    for blocks in ((4,), ()):
        with pytest.raises(dm.Refused, match="blocks"):
            dm.reconstruct(exposure, "stepwise", labels=batch.targets, blocks=blocks, **options)


@pytest.mark.parametrize("options", [{"pixel_noise": 0.2}, {"registration": True, "consistency_onset": 0.0}])
def test_gradinversions_noise_and_registration_change_the_run_and_keep_its_seed(options: dict) -> None:
    batch = digits(3)
    exposure = dm.observe(network(norm=True), batch)
    settings = {"steps": 40, "restarts": 2, "consistency": 0.1, "total_variation": 1e-4, "batch_norm": 1e-5, "seed": 1}
    plain = dm.reconstruct(exposure, "gradinversion", labels=batch.targets, **settings)
    first, again = (dm.reconstruct(exposure, "gradinversion", labels=batch.targets, **settings, **options) for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    assert not torch.equal(first.inputs, plain.inputs)
    assert gain_over_grey(first, batch) > 2


def test_gradinversion_and_stepwise_need_labels() -> None:
    exposure = dm.observe(network(norm=True), digits(3))
    for attack in ("gradinversion", "stepwise"):
        with pytest.raises(dm.Refused, match="needs labels"):
            dm.reconstruct(exposure, attack, steps=1)


def test_gradinversion_refuses_a_model_without_batch_norm_and_says_what_to_set() -> None:
    batch = digits(3)
    exposure = dm.observe(network(norm=False), batch)
    with pytest.raises(dm.Refused, match="set batch_norm=0"):
        dm.reconstruct(exposure, "gradinversion", labels=batch.targets, steps=1)
    assert dm.reconstruct(exposure, "gradinversion", labels=batch.targets, steps=1, batch_norm=0.0).outcome == dm.Outcome.COMPLETED
