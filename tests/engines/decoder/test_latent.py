"""The latent space of a decoder, and the two searches on it."""

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.decoder import nulls as nulls_of
from dosimeter.engines.decoder.cache import obtain
from dosimeter.engines.decoder.latent import Latent, descend, evaluate, evolve
from dosimeter.engines.decoder.nulls import decoder_nulls
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.matching.distances import Cosine
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.problem import make_problem
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.runs.server import as_label_estimate


@pytest.fixture
def exposure(normed_classifier, digits):
    images, labels = digits
    auxiliary = dm.Batch(images[500:700], labels[500:700])
    return dm.observe(normed_classifier.eval(), dm.Batch(images[:2], labels[:2]), auxiliary=auxiliary)


@pytest.fixture
def latent(exposure, rng):
    target, trained = obtain(exposure, DecoderSettings(width=16, epochs=3), None)
    return Latent.of(target, trained.decoder, exposure.auxiliary.inputs, 6, rng)


def problem_of(exposure, digits):
    recipe = Recipe(distance=Cosine(), optimiser=Adam(), rate=Rate(start=0.1), steps=10)
    return make_problem(exposure, as_label_estimate(digits[1][:2], exposure.public), recipe)


def test_the_axes_are_the_principal_ones(exposure, latent):
    features = latent.target.features_in_batches(exposure.auxiliary.inputs, 32)
    _, values, rows = torch.linalg.svd(features - features.mean(0), full_matrices=False)
    lengths = torch.linalg.vector_norm(latent.axes, dim=1)
    assert torch.allclose(lengths, values[:6] / len(features) ** 0.5, rtol=1e-3)
    aligned = (latent.axes / lengths[:, None] * rows[:6]).sum(1).abs()
    assert torch.allclose(aligned, torch.ones(6), atol=1e-2)
    assert torch.allclose(latent.mean, features.mean(0), atol=1e-5)


def test_descent_hands_the_slope_on_through_the_decoder(exposure, latent, digits):
    """The first Adam step goes against the difference quotients of the whole objective, which jumps where a ReLU switches."""
    problem = problem_of(exposure, digits)
    start = torch.zeros(2, 6)

    def objective(coordinates):
        with torch.no_grad():
            return float(evaluate(problem, latent.draw(coordinates)[None]).objective[0])

    best, reached = descend(latent, problem, start, steps=2, rate=0.01, penalty=0.0)
    steps = 0.001 * torch.eye(12).view(12, 2, 6)
    quotients = torch.tensor([(objective(start + step) - objective(start - step)) / 0.002 for step in steps]).view(2, 6)
    assert reached[0] == pytest.approx(objective(start), abs=1e-5)
    assert reached[1] < reached[0]
    assert int((torch.sign(best) == -torch.sign(quotients)).sum()) >= 10


def test_both_searches_lower_the_objective(exposure, latent, digits, rng):
    problem = problem_of(exposure, digits)
    start = torch.zeros(2, 6)
    _, descended = descend(latent, problem, start, steps=40, rate=0.1, penalty=1e-3)
    _, evolved = evolve(latent, problem, start, rng, steps=40, population=8, penalty=1e-3)
    assert min(descended) < 0.5 * descended[0]
    assert min(evolved) < 0.6 * evolved[0]


def test_nulls_of_the_decoder(exposure, latent, rng, monkeypatch):
    """The mean feature gives one picture, foreign features those of auxiliary images, shuffled ones keep each entry once."""
    monkeypatch.setattr(nulls_of, "MOMENTS", 256)  # all of the auxiliary images, as the latent space is taken from
    features = torch.arange(2 * 256.0).reshape(2, 256)
    nulls = decoder_nulls(exposure, latent.target, latent.decoder, rng, count=2, features=features)
    assert set(nulls) == {"foreign features", "mean feature", "shuffled features"}
    assert torch.equal(nulls["mean feature"][0], nulls["mean feature"][1])
    assert torch.allclose(nulls["mean feature"][0], latent.draw(torch.zeros(1, 6))[0], atol=1e-4)
    nearest = torch.cdist(nulls["foreign features"].flatten(1), exposure.auxiliary.inputs.flatten(1)).amin(1)
    assert float(nearest.max()) < 0.5 * float(exposure.auxiliary.inputs.flatten(1).norm(dim=1).mean())
    assert "shuffled features" not in decoder_nulls(exposure, latent.target, latent.decoder, rng, count=2)
