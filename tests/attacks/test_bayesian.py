"""The Bayesian attacker minimises the negative logarithm of the posterior that the declared noise gives."""

import math

import pytest
import torch

import dosimeter as dm
from dosimeter.attacks.bayesian import NEIGHBOURS, Bayesian
from dosimeter.engines.adaptation import adapt
from dosimeter.models.loading import load_model


@pytest.fixture
def one(digits) -> dm.Batch:
    images, labels = digits
    return dm.Batch(images[100:101].clone(), labels[100:101].clone())


@pytest.fixture
def model():
    return load_model("small_cnn", {"size": 8, "width": 8, "channels": 1}, None, 3).eval()


def size_of(update) -> float:
    return math.sqrt(sum(float(change.square().sum()) for change in update.values()) / sum(change.numel() for change in update.values()))


def noise_of(shape: str, deviation: float):
    return dm.defense("gaussian_noise", std=deviation) if shape == "normal" else dm.defense("laplace_noise", scale=deviation / math.sqrt(2))


def negative_logarithm(
    exposure: dm.Exposure, inputs: torch.Tensor, labels: torch.Tensor, shape: str, deviation: float, scale: float
) -> float:
    """−log p(g | x) − log p(x) up to constants, by the densities themselves."""
    guess = exposure.public.training(exposure.model, inputs, labels, dm.CrossEntropy())
    noise = torch.distributions.Normal(0.0, deviation) if shape == "normal" else torch.distributions.Laplace(0.0, deviation / math.sqrt(2))
    prior = torch.distributions.Laplace(0.0, scale)
    density = sum(float(noise.log_prob((exposure.update[name] - guess[name]).double()).sum()) for name in guess)
    down, right = inputs.double().diff(dim=-2), inputs.double().diff(dim=-1)
    pixels, per_direction = inputs.numel(), down.numel()
    picture = 0.5 * pixels / per_direction * float(prior.log_prob(down).sum() + prior.log_prob(right).sum())
    return -density - picture


@pytest.mark.parametrize("shape", ["normal", "laplace"])
@pytest.mark.parametrize("known", [True, False])
def test_the_objective_is_the_posteriors(model, one, digits, shape, known) -> None:
    deviation = 0.1 * size_of(dm.observe(model, one).update)
    auxiliary = dm.Batch(digits[0][1000:1100], digits[1][1000:1100]) if known else None
    exposure = dm.observe(model, one, defenses=(noise_of(shape, deviation),), auxiliary=auxiliary)
    attack = Bayesian(steps=5)
    found = dm.reconstruct(exposure, attack, labels=one.targets)
    scale = NEIGHBOURS
    if auxiliary is not None:
        scale = float(auxiliary.inputs.diff(dim=-2).abs().mean() + auxiliary.inputs.diff(dim=-1).abs().mean()) / 2
    places = [one.inputs, torch.full_like(one.inputs, 0.5), 0.8 * one.inputs + 0.1]
    ours = torch.tensor([attack.objective(exposure, found, place, one.targets) for place in places], dtype=torch.float64)
    theirs = torch.tensor([negative_logarithm(exposure, place, one.targets, shape, deviation, scale) for place in places])
    ratio = (theirs[1:] - theirs[0]) / (ours[1:] - ours[0])  # an objective is a posterior over a constant
    assert float(ratio[0]) > 0
    torch.testing.assert_close(ratio[1], ratio[0], rtol=1e-3, atol=0.0)


def test_more_noise_gives_the_prior_more_weight(model, one) -> None:
    weights = []
    for std in (1e-4, 1e-3, 1e-2):
        exposure = dm.observe(model, one, defenses=(dm.defense("gaussian_noise", std=std),))
        weights.append(Bayesian().posterior(exposure)[1] * sum(float(change.square().sum()) for change in exposure.update.values()))
    assert weights[1] / weights[0] == pytest.approx(100, rel=1e-3)
    assert weights[2] / weights[1] == pytest.approx(100, rel=1e-3)
    assert 0 < Bayesian().posterior(dm.observe(model, one))[1] < 1e-2  # without noise hardly any


def test_it_beats_matching_without_the_noise_in_mind(model, digits) -> None:
    gain, auxiliary = [], dm.Batch(digits[0][1000:1100], digits[1][1000:1100])
    for number in (100, 101):
        batch = dm.Batch(digits[0][number : number + 1], digits[1][number : number + 1])
        deviation = 0.1 * size_of(dm.observe(model, batch).update)
        exposure = dm.observe(model, batch, defenses=(noise_of("laplace", deviation),), auxiliary=auxiliary)
        found = [dm.reconstruct(exposure, name, labels=batch.targets, steps=300) for name in ("bayesian", "inverting_gradients")]
        psnr = [float(dm.score(one, batch, metrics=["psnr"])["psnr"][0]) for one in found]
        gain.append(psnr[0] - psnr[1])
    assert sum(gain) / len(gain) > 1.0


def test_an_audit_weighs_layers_by_their_own_noise_and_replays_pruning(model, one) -> None:
    noise = dm.defense("gaussian_noise", std=0.01, relative=True)
    sent = dm.observe(model, one, defenses=(noise,))
    before, after = ([noise.noise_floor(c, 1) for c in seen.update.values()] for seen in (sent, adapt(Bayesian(), sent).exposure))
    assert max(before) > 2 * min(before)
    assert max(after) == pytest.approx(min(after), rel=1e-3)
    assert adapt(Bayesian(), dm.observe(model, one, defenses=(dm.defense("pruning", ratio=0.9),))).changed


def test_labels_are_needed(model, one) -> None:
    with pytest.raises(dm.Refused, match="labels"):
        dm.reconstruct(dm.observe(model, one), Bayesian(steps=5))
