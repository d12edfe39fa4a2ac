"""The search of a decoder's latent space: better than its start, in either form, and refused without what it needs."""

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
    batch = dm.Batch(images[:2], labels[:2])
    return batch, dm.observe(normed_classifier.eval(), batch, auxiliary=dm.Batch(images[500:900], labels[500:900]))


OPTIONS = {"width": 16, "epochs": 8, "dimensions": 32}


def test_descent_finds_the_batch_and_beats_its_nulls(setting):
    batch, exposure = setting
    found = dm.reconstruct(exposure, "generative_prior", labels=batch.targets, steps=150, **OPTIONS)
    scores = dm.score(found, batch, exposure=exposure)
    best = torch.stack([null["psnr"] for null in scores.nulls.values()]).amax(0)
    assert float((scores["psnr"] - best).min()) > 3
    assert {"mean", "nearest", "foreign features", "mean feature"} == set(scores.nulls)


def test_the_second_stage_leaves_the_range_of_the_decoder_and_not_the_decoder_behind(setting):
    batch, exposure = setting
    options = OPTIONS | {"dimensions": 8, "steps": 60}
    latent = dm.reconstruct(exposure, "generative_prior", labels=batch.targets, **options)
    both = dm.reconstruct(exposure, "generative_prior", labels=batch.targets, generator_steps=120, **options)
    assert both.distance < 0.5 * latent.distance
    psnr = [dm.score(one, batch, metrics=["psnr"])["psnr"] for one in (latent, both)]
    assert float((psnr[1] - psnr[0]).mean()) > 2
    again = dm.reconstruct(exposure, "generative_prior", labels=batch.targets, **options)
    assert torch.equal(again.inputs, latent.inputs)  # the copies moved, and not the decoder that is kept


def test_the_second_stage_needs_a_slope(digits):
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Rounded(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Sigmoid(), torch.nn.Linear(20, 10)).eval()
    exposure = dm.observe(model, dm.Batch(images[:2], labels[:2]), auxiliary=dm.Batch(images[500:600], labels[500:600]))
    options = OPTIONS | {"epochs": 1, "dimensions": 8, "population": 4, "search": "evolution", "generator_steps": 2}
    with pytest.raises(Refused, match="without generator_steps needs no gradient"):
        dm.reconstruct(exposure, "generative_prior", labels=labels[:2], steps=2, **options)


def test_evolution_lowers_the_distance_without_a_slope(setting):
    batch, exposure = setting
    options = OPTIONS | {"dimensions": 8, "search": "evolution", "population": 8}
    few, more = (dm.reconstruct(exposure, "generative_prior", labels=batch.targets, steps=steps, **options) for steps in (2, 60))
    assert more.distance < 0.7 * few.distance


class Rounded(torch.nn.Sequential):
    def forward(self, images):
        return super().forward((images * 16).round() / 16)


def test_a_model_without_a_slope_is_searched_by_evolution_alone(digits):
    images, labels = digits
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Rounded(torch.nn.Flatten(), torch.nn.Linear(64, 20), torch.nn.Sigmoid(), torch.nn.Linear(20, 10)).eval()
    batch = dm.Batch(images[:2], labels[:2])
    exposure = dm.observe(model, batch, auxiliary=dm.Batch(images[500:600], labels[500:600]))
    options = OPTIONS | {"epochs": 1, "dimensions": 8, "population": 4}
    with pytest.raises(Refused, match=r'passes no gradient to its inputs.*search="evolution" without generator_steps needs no gradient'):
        dm.reconstruct(exposure, "generative_prior", labels=batch.targets, steps=2, **options)
    found = dm.reconstruct(exposure, "generative_prior", labels=batch.targets, steps=20, search="evolution", **options)
    assert found.outcome is dm.Outcome.COMPLETED


def test_refusals(setting, normed_classifier):
    batch, exposure = setting
    with pytest.raises(Refused, match="needs labels"):
        dm.reconstruct(exposure, "generative_prior", **OPTIONS)
    with pytest.raises(Refused, match="needs auxiliary data"):
        dm.reconstruct(dm.observe(normed_classifier, batch), "generative_prior", labels=batch.targets)
    with pytest.raises(ValueError, match="'descent', 'evolution'"):
        dm.attack("generative_prior", search="luck")
