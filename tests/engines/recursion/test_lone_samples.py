"""Claims of lone samples: each with a proof, none of a mixture, never more than the declared size."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.recursion.lone_samples import FirstRows, read_lone_samples

FIRST = FirstRows(weights=["1.weight"], biases=["1.bias"])


def network(classes: int, activation: nn.Module, seed: int, width: int = 100) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), activation, nn.Linear(width, classes))


def draw(count: int, classes: int, seed: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randint(classes, (count,), generator=rng))


def errors(found: dm.Reconstruction, batch: dm.Batch) -> torch.Tensor:
    """The relative distance of each claim to the nearest sample."""
    truth = batch.inputs.flatten(1)
    return (torch.cdist(found.inputs.flatten(1), truth) / truth.norm(dim=1).clamp_min(1.0)).min(1).values


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.01), nn.LeakyReLU(0.1), nn.ReLU6(), nn.Tanh()])
@pytest.mark.parametrize("classes", [2, 3, 10])
def test_no_mixture_is_claimed(activation, classes) -> None:
    for seed in range(12):
        batch = draw((2, 3, 4, 8)[seed % 4], classes, seed)
        found = dm.reconstruct(dm.observe(network(classes, activation, seed), batch), "linear_recursion")
        assert len(found.inputs) <= len(batch.inputs)
        assert (errors(found, batch) < 1e-3).all()
        assert bool(found.premises) == bool(len(found.inputs))


@pytest.mark.parametrize("classes", [2, 10])
def test_most_samples_of_a_small_batch_are_claimed(classes) -> None:
    claimed = 0
    for seed in range(10):
        batch = draw(3, classes, seed)
        claimed += len(dm.reconstruct(dm.observe(network(classes, nn.ReLU(), seed, 300), batch), "linear_recursion").inputs)
    assert claimed >= 15


def test_two_classes_make_rows_of_mixtures_agree_and_the_own_gradient_tells_them() -> None:
    """With two classes the rows that both samples fire are proportional: dozens of them agree on the same mixture."""
    batch = dm.Batch(draw(2, 2, 0).inputs, torch.tensor([0, 0]))
    exposure = dm.observe(network(2, nn.ReLU(), 0, 300), batch)
    weight, bias = exposure.update["1.weight"], exposure.update["1.bias"]
    both = (exposure.model[1](batch.inputs.flatten(1)) > 0).all(0)
    shown = weight[both] / bias[both, None]
    assert int(both.sum()) > 30
    assert float((shown - shown[0]).norm(dim=1).max()) < 1e-4 * float(shown[0].norm())  # all agree, on a mixture
    found = read_lone_samples(exposure, FIRST, None)
    assert len(found.inputs) == 2
    assert float(errors(found, batch).max()) < 1e-5


def test_of_a_duplicate_only_independent_rows_prove_anything() -> None:
    """Its weight is that of two alike samples. With two classes it is not claimed; the other samples are."""
    for classes, claimed in ((2, [2, 3]), (10, [0, 2, 3])):
        batch = draw(4, classes, 5)
        batch.inputs[1] = batch.inputs[0]
        found = read_lone_samples(dm.observe(network(classes, nn.ReLU(), 5, 300), batch), FIRST, None)
        assert float(errors(found, batch).max()) < 1e-5
        nearest = torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)).argmin(1)
        assert sorted(nearest.tolist()) == claimed


def test_no_mean_of_alike_samples_is_claimed() -> None:
    """Alike samples of one label share a linear region of a small network, and so do a black image and any other without biases."""
    for seed in range(40):
        batch = draw(2, 2, seed)
        inputs = 0.9 * batch.inputs[:1] + 0.1 * batch.inputs if seed % 2 else batch.inputs * torch.tensor([0.0, 1.0]).reshape(2, 1, 1, 1)
        model = network(2, nn.LeakyReLU(0.01), seed, 30)
        with torch.no_grad():
            model[1].bias.mul_(seed % 2)
            model[3].weight.mul_(0.05)
        alike = dm.Batch(inputs, torch.tensor([1, 1]))
        found = read_lone_samples(dm.observe(model, alike), FIRST, None)
        assert (errors(found, alike) < 1e-3).all()


def test_independent_rows_and_a_common_share_prove_samples_where_no_size_is_declared() -> None:
    proved = 0
    for seed in range(6):
        batch = draw(4, 10, seed)
        found = read_lone_samples(dm.observe(network(10, nn.ReLU(), seed, 300), batch, declare_batch_size=False), FIRST, None)
        assert (errors(found, batch) < 1e-4).all()
        proved += len(found.inputs)
    assert proved >= 6


@pytest.mark.parametrize("options", [{"declare_batch_size": False}, {"defenses": (dm.defense("clipping", max_norm=0.01),)}])
def test_two_classes_prove_samples_by_the_factor_that_all_of_them_have(options) -> None:
    """The rows of two classes are proportional. But one factor, which clipping or an undeclared size hides, fits all samples at once."""
    claimed = 0
    for seed in range(6):
        batch = draw(4, 2, seed)
        found = read_lone_samples(dm.observe(network(2, nn.ReLU(), seed, 300), batch, **options), FIRST, None)
        assert (errors(found, batch) < 1e-4).all()
        claimed += len(found.inputs)
    assert claimed >= 12


@pytest.mark.parametrize("classes", [2, 10])
@pytest.mark.parametrize(
    "options",
    [
        {"defenses": (dm.defense("quantisation", bits=16),)},
        {"defenses": (dm.defense("gaussian_noise", std=1e-7),)},
        {"training": dm.FedAvg(learning_rate=0.5)},
    ],
    ids=["16 bits", "noise", "one step of FedAvg"],
)
def test_faint_noise_hides_no_sample_that_many_rows_show(options, classes) -> None:
    claimed = 0
    for seed in range(6):
        batch = draw(3, classes, seed)
        found = read_lone_samples(dm.observe(network(classes, nn.ReLU(), seed, 300), batch, **options), FIRST, None)
        assert (errors(found, batch) < 5e-4).all()
        claimed += len(found.inputs)
    assert claimed >= (8 if classes == 2 else 14)  # of 18


def test_clipping_that_did_not_happen_hides_nothing() -> None:
    """A norm below the bound was not clipped, neither of the update nor of a layer."""
    batch = draw(3, 2, 1)
    plain = read_lone_samples(dm.observe(network(2, nn.ReLU(), 1, 300), batch), FIRST, None)
    for mode in ("norm", "layer"):
        defense = dm.defense("clipping", max_norm=100.0, mode=mode)
        found = read_lone_samples(dm.observe(network(2, nn.ReLU(), 1, 300), batch, defenses=(defense,)), FIRST, None)
        assert len(plain.inputs) >= 2
        assert torch.equal(found.inputs, plain.inputs)


def test_a_wrong_declared_size_is_refuted_or_changes_no_claim() -> None:
    for seed in range(6):
        batch = draw(4, 2, seed)
        exposure = dm.observe(network(2, nn.ReLU(), seed, 300), batch)
        for size in (2, 3, 5):
            wrong = replace(exposure, public=replace(exposure.public, batch_size=size))
            assert (errors(read_lone_samples(wrong, FIRST, None), batch) < 1e-3).all()


def test_more_claims_than_the_declared_size_are_none() -> None:
    pictures = draw(6, 10, 3)
    pictures = dm.Batch((pictures.inputs * 255).round() / 255, pictures.targets)
    exposure = dm.observe(network(10, nn.ReLU(), 3, 300), pictures)
    assert len(read_lone_samples(exposure, FIRST, None).inputs) > 2
    found = read_lone_samples(replace(exposure, public=replace(exposure.public, batch_size=2)), FIRST, None)
    assert (len(found.inputs), found.outcome, found.premises) == (0, dm.Outcome.AMBIGUOUS, ())
    assert "more than the declared 2" in found.message


@pytest.mark.parametrize(
    "defense",
    [
        dm.defense("quantisation", bits=6),
        dm.defense("quantisation", bits=8),
        dm.defense("pruning", ratio=0.9),
        dm.defense("gaussian_noise", std=1e-3),
        dm.defense("sign"),
        dm.defense("low_rank", rank=4),
        dm.defense("clipping", max_norm=0.01, mode="layer"),
    ],
    ids=lambda defense: defense.name,
)
def test_nothing_is_claimed_that_a_defense_could_have_made(defense) -> None:
    for seed in range(5):
        batch = draw(4, 10, seed)
        found = read_lone_samples(dm.observe(network(10, nn.ReLU(), seed, 300), batch, defenses=(defense,)), FIRST, None)
        assert (len(found.inputs), found.premises) == (0, ())


def test_rows_that_a_mild_defense_leaves_alone_still_count() -> None:
    batch = draw(4, 10, 0)
    for defense in (dm.defense("gaussian_noise", std=1e-8), dm.defense("clipping", max_norm=0.1)):
        found = read_lone_samples(dm.observe(network(10, nn.ReLU(), 0, 300), batch, defenses=(defense,)), FIRST, None)
        assert len(found.inputs) >= 2
        assert (errors(found, batch) < 1e-3).all()


def test_an_undeclared_distortion_is_named() -> None:
    found = read_lone_samples(dm.observe(network(10, nn.ReLU(), 0), draw(4, 10, 0), defenses=(dm.defense("sign"),)), FIRST, None)
    assert found.outcome is dm.Outcome.SINGULAR
    assert "sign changes the update in ways that it does not declare" in found.message


def test_premises_say_what_the_claims_rest_on() -> None:
    batch = draw(3, 10, 2)
    exposure = dm.observe(network(10, nn.ReLU(), 2, 300), batch)
    found = read_lone_samples(exposure, FIRST, None, tampered="trap rows")
    assert "the batch size is 3, as declared" in found.premises
    assert "the client trained the model with trap rows, as sent" in found.premises
    assert not any("256 levels" in premise for premise in found.premises)
    pictures = dm.observe(exposure.model, dm.Batch((batch.inputs * 255).round() / 255, batch.targets))
    assert "the inputs are pictures of 256 levels a pixel" in read_lone_samples(pictures, FIRST, None).premises


@pytest.mark.parametrize("classes", [2, 3])
def test_two_local_steps_hide_no_sample_of_few_classes(classes) -> None:
    claimed = 0
    for seed in range(6):
        batch = draw(3, classes, seed)
        exposure = dm.observe(network(classes, nn.ReLU(), seed, 300), batch, training=dm.FedAvg(learning_rate=0.5, steps=2))
        found = read_lone_samples(exposure, FIRST, None)
        assert (errors(found, batch) < 1e-4).all()
        claimed += len(found.inputs)
    assert claimed >= 9  # of 18
