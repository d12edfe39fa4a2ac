"""The front door: which surface an estimate belongs to, and what no surface can score."""

import pytest
import torch

import dosimeter as dm


@pytest.fixture
def truth(digits) -> dm.Batch:
    return dm.Batch(digits.inputs[:2], digits.targets[:2])


@pytest.fixture
def found(truth) -> dm.Reconstruction:
    return dm.Reconstruction(inputs=truth.inputs, labels=truth.targets, objective=0.0)


def test_an_estimate_is_scored_by_its_own_surface(found, truth, classifier):
    exposure = dm.observe(classifier, truth)
    features = torch.zeros(2, 12)
    nothing = torch.zeros(2, dtype=torch.bool)
    estimates = {
        "labels": dm.LabelEstimate(counts=torch.tensor([1, 1]), labels=torch.tensor([0, 1])),
        "features": dm.FeatureEstimate(features=features, labels=truth.targets, residual=torch.zeros(2), certified=nothing),
        "inputs": found,
    }
    assert {name: dm.score(estimate, truth, exposure=exposure).surface for name, estimate in estimates.items()} == {
        name: name for name in estimates
    }


def test_what_is_no_estimate_of_any_surface_is_refused(found, truth):
    with pytest.raises(TypeError, match="MembershipEstimate, got Tensor"):
        dm.score(truth.inputs, truth)
    with pytest.raises(TypeError, match="expected a Reconstruction"):
        dm.score(found, truth, foreign=dm.LabelEstimate(counts=torch.tensor([1, 1]), labels=torch.tensor([0, 1])))


def test_metrics_of_another_surface_and_unknown_ones_are_refused(found, truth):
    with pytest.raises(ValueError, match="insacc scores labels"):
        dm.score(found, truth, metrics=["insacc"])
    with pytest.raises(ValueError, match="did you mean 'psnr'"):
        dm.score(found, truth, metrics=["pnsr"])


def test_empty_batches_are_refused(found, truth):
    empty = dm.Batch(torch.zeros(0, 1, 8, 8), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(ValueError, match="truth: expected a Batch"):
        dm.score(found, empty)
    with pytest.raises(ValueError, match="auxiliary: expected at least one sample"):
        dm.score(found, truth, auxiliary=empty)


def test_samples_that_the_model_of_the_exposure_does_not_take_are_refused(found, truth, classifier):
    exposure = dm.observe(classifier, truth)
    wrong = {
        "expected real numbers, got torch.complex64": truth.inputs.to(torch.complex64),
        "inputs: model: cannot take": torch.rand(2, 1, 5, 5),
        "inputs: has NaN or infinite values": truth.inputs * torch.nan,
    }
    for sentence, inputs in wrong.items():
        for options in ({"truth": dm.Batch(inputs, truth.targets)}, {"truth": truth, "auxiliary": dm.Batch(inputs, truth.targets)}):
            with pytest.raises(ValueError, match=sentence):
                dm.score(found, exposure=exposure, **options)
    with pytest.raises(TypeError, match="auxiliary: expected a Batch"):
        dm.score(found, truth, auxiliary=3)  # pyright: ignore[reportArgumentType]
