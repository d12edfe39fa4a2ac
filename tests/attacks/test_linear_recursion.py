"""Linear recursion: exact inputs of fully-connected networks without bias, soft labels unknown; first-layer quotients of batches."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def network(activation: nn.Module, bias: bool, seed: int = 3) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Flatten(),
            nn.Linear(64, 48, bias=bias),
            activation,
            nn.Linear(48, 32, bias=bias),
            activation,
            nn.Linear(32, 10, bias=bias),
        )


def decibels(found: dm.Reconstruction, batch: dm.Batch) -> float:
    return float(-10 * (found.inputs - batch.inputs).double().square().mean().log10())


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.LeakyReLU(0.1), nn.Tanh(), nn.Sigmoid(), nn.ELU()])
@pytest.mark.parametrize("kind", ["one_hot", "smoothed", "mixed", "mixed and smoothed"])
def test_without_bias_and_without_labels(activation, kind, digits) -> None:
    images, labels = digits
    for index in (30, 91):
        one, other = (nn.functional.one_hot(labels[i : i + 1], 10).float() for i in (index, index + 1))
        mixed = 0.35 * one + 0.65 * other
        target = {"one_hot": one, "smoothed": 0.7 * one + 0.03, "mixed": mixed, "mixed and smoothed": 0.8 * mixed + 0.02}[kind]
        batch = dm.Batch(images[index : index + 1], target)
        found = dm.reconstruct(dm.observe(network(activation, bias=False), batch), "linear_recursion")
        assert decibels(found, batch) > 60
        assert float((found.labels - target).abs().sum()) < 1e-3
        assert found.outcome is dm.Outcome.COMPLETED, found.message


def test_behind_clipping_the_scale_is_a_guess_and_with_bias_it_is_not(digits) -> None:
    images, labels = digits
    batch, clipping = dm.Batch(images[5:6], labels[5:6]), dm.defense("clipping", max_norm=0.01)
    without, with_bias = (
        dm.reconstruct(dm.observe(network(nn.ReLU(), bias=bias), batch, defenses=[clipping]), "linear_recursion") for bias in (False, True)
    )
    assert without.outcome is dm.Outcome.AMBIGUOUS
    assert "clipping changes the gradient's values" in without.message
    assert decibels(with_bias, batch) > 60


def test_a_given_label_settles_the_scale(digits) -> None:
    images, labels = digits
    batch = dm.Batch(images[5:6], labels[5:6])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=False), batch), "linear_recursion", labels=batch.targets)
    assert decibels(found, batch) > 60


def test_with_bias_the_first_layer_is_divided(digits) -> None:
    images, labels = digits
    one = dm.Batch(images[7:8], labels[7:8])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=True), one), "linear_recursion")
    assert decibels(found, one) > 80
    several = dm.Batch(images[10:13], labels[10:13])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=True), several), "linear_recursion")
    assert len(found.inputs) >= 1
    assert float(torch.cdist(found.inputs.flatten(1), several.inputs.flatten(1)).min(1).values.max()) < 1e-2


class Functional(nn.Module):
    """A first layer of bare parameters, and an activation that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(0.1 * torch.randn(200, 64)), nn.Parameter(torch.zeros(200))
        self.head = nn.Linear(200, 10)

    def forward(self, inputs):
        return self.head(nn.functional.relu(nn.functional.linear(inputs.flatten(1), self.weight, self.offset)))


FC_FIRST = {
    "gelu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.GELU(), nn.Linear(200, 10)),
    "silu": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.SiLU(), nn.Linear(200, 10)),
    "layer norm": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.LayerNorm(200), nn.ReLU(), nn.Linear(200, 10)),
    "convolution": lambda: nn.Sequential(nn.Conv2d(1, 200, 8), nn.ReLU(), nn.Conv2d(200, 10, 1), nn.Flatten()),
    "bare parameters": Functional,
    "no linear head": lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10), nn.Softplus()),
}


@pytest.mark.parametrize("name", list(FC_FIRST))
def test_a_first_layer_with_bias_is_divided_whatever_follows(name, digits) -> None:
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = FC_FIRST[name]()
    for index in (3, 44):
        one = dm.Batch(images[index : index + 1], labels[index : index + 1])
        found = dm.reconstruct(dm.observe(model, one), "linear_recursion")
        assert decibels(found, one) > 80
        assert (found.outcome, found.message) == (dm.Outcome.COMPLETED, "")


@pytest.mark.parametrize("name", ["convolution", "bare parameters"])
def test_neurons_that_fire_alone_show_samples_of_a_batch_whatever_follows(name, digits) -> None:
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(6)
        model = FC_FIRST[name]()
    several = dm.Batch(images[20:23], labels[20:23])
    found = dm.reconstruct(dm.observe(model, several), "linear_recursion")
    assert len(found.inputs) >= 1
    assert float(torch.cdist(found.inputs.flatten(1), several.inputs.flatten(1)).min(1).values.max()) < 1e-2


def test_one_sample_outside_the_range_and_with_entries_withheld(digits) -> None:
    images, labels = digits
    one = dm.Batch(5 * images[9:10] - 2, labels[9:10])
    with pytest.warns(UserWarning, match="outside"):
        exposure = dm.observe(network(nn.ReLU(), bias=True), one)
    found = dm.reconstruct(exposure, "linear_recursion")
    assert decibels(found, one) > 80
    kept = torch.rand(exposure.update["1.weight"].shape, generator=torch.Generator().manual_seed(1)) < 0.7
    exposure.update["1.weight"][~kept] = 0.0
    found = dm.reconstruct(exposure, "linear_recursion")
    assert decibels(found, one) > 80
    exposure.update["1.weight"][kept] += 0.1 * exposure.update["1.weight"].std()
    assert "disagree" in dm.reconstruct(exposure, "linear_recursion").message


def two_classes(seed: int, activation: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 60, bias=False), activation, nn.Linear(60, 2, bias=False))


@pytest.mark.parametrize("activation", [nn.ReLU(), nn.Tanh()])
def test_two_classes_have_several_scales_and_the_right_one_is_claimed_or_none(activation, digits) -> None:
    images, labels = digits
    completed = 0
    for seed in range(20):
        batch = dm.Batch(images[seed : seed + 1] * (0.2 if seed % 4 == 3 else 1.0), labels[seed : seed + 1] % 2)
        exposure = dm.observe(two_classes(seed, activation), batch)
        found = dm.reconstruct(exposure, "linear_recursion", labels=batch.targets)
        right = float((found.inputs - batch.inputs).abs().max()) < 0.02
        assert found.outcome in (dm.Outcome.COMPLETED, dm.Outcome.AMBIGUOUS)
        assert right or (found.outcome is dm.Outcome.AMBIGUOUS and "other scale" in found.message)
        completed += found.outcome is dm.Outcome.COMPLETED
        guessed = dm.reconstruct(exposure, "linear_recursion")
        assert guessed.outcome is dm.Outcome.AMBIGUOUS
        assert "two classes" in guessed.message
        assert float(torch.cosine_similarity(guessed.inputs.flatten(), batch.inputs.flatten(), 0)) > 0.999
    assert completed >= 10


def test_a_gradient_of_zero_shows_nothing(digits) -> None:
    black = dm.Batch(torch.zeros_like(digits[0][:1]), digits[1][:1])
    found = dm.reconstruct(dm.observe(network(nn.ReLU(), bias=False), black), "linear_recursion")
    assert found.outcome is dm.Outcome.SINGULAR
    assert len(found.inputs) == 0


def test_layers_with_nothing_between_them_are_walked_through(digits) -> None:
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(4)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30, bias=False), nn.Linear(30, 40, bias=False), nn.Tanh(), nn.Linear(40, 10))
    batch = dm.Batch(images[8:9], labels[8:9])
    found = dm.reconstruct(dm.observe(model, batch), "linear_recursion")
    assert decibels(found, batch) > 60


def test_refusals(digits, classifier) -> None:
    images, labels = digits
    with pytest.raises(dm.Refused, match="batch of one"):
        dm.reconstruct(dm.observe(network(nn.ReLU(), bias=False), dm.Batch(images[:2], labels[:2])), "linear_recursion")
    layer = nn.Linear(64, 64, bias=False)
    tied = nn.Sequential(nn.Flatten(), layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(64, 10, bias=False))
    with pytest.raises(dm.Refused, match="used twice"):
        dm.reconstruct(dm.observe(tied, dm.Batch(images[:1], labels[:1])), "linear_recursion")
    exposure = dm.observe(network(nn.ReLU(), bias=False), dm.Batch(images[:1], labels[:1]))
    exposure.update.pop("5.weight")
    with pytest.raises(dm.Refused, match="withholds"):
        dm.reconstruct(exposure, "linear_recursion")
    with pytest.raises(dm.Refused, match="plain chain"):
        dm.reconstruct(dm.observe(classifier, dm.Batch(images[:1], labels[:1])), "linear_recursion")
    with pytest.raises(dm.Refused, match="knows ReLU"):
        dm.reconstruct(dm.observe(network(nn.GELU(), bias=False), dm.Batch(images[:1], labels[:1])), "linear_recursion")
