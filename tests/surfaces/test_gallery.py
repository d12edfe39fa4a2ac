"""Identification in scores: beside its chance, for the foreign null too, and only with auxiliary samples."""

import pytest
import torch

import dosimeter as dm
from dosimeter.surfaces.inputs import Inputs
from dosimeter.types import Outcome, Reconstruction


def reconstruction(inputs):
    return Reconstruction(inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.long), outcome=Outcome.COMPLETED, objective=0.0)


@pytest.fixture
def samples():
    coarse = torch.rand(220, 3, 6, 6, generator=torch.Generator().manual_seed(5))
    inputs = torch.nn.functional.interpolate(coarse, size=(24, 24), mode="bilinear")
    return dm.Batch(inputs, torch.arange(220) % 10)


def part(batch, places):
    return dm.Batch(batch.inputs[places], batch.targets[places])


def test_a_recovered_picture_is_identified_and_a_foreign_one_is_not(samples):
    truth, auxiliary = part(samples, slice(0, 4)), part(samples, slice(4, 200))
    found = reconstruction((samples.inputs[:4].roll(3, 3) * 0.5 + 0.2).flip(0))
    scores = dm.score(found, truth, auxiliary=auxiliary, foreign=reconstruction(samples.inputs[200:204]))
    assert scores["identification"].tolist() == [1, 1, 1, 1]
    assert scores.nulls["foreign"]["identification"].tolist() == [0, 0, 0, 0]
    assert all(set(null) == set(scores) for null in scores.nulls.values())
    (told,) = scores.details["identification"]
    assert (told["gallery"], told["identified"], told["by_chance"]) == (100, 4, pytest.approx(0.16))
    assert told["probability"] == pytest.approx(1 / 3_921_225)  # one of all choices of 4 out of 100
    assert "4 of 4 private pictures are picked out of a gallery of 100, 0.16 expected by chance" in Inputs().facts(scores.details)[0]


def test_a_large_gallery_is_told_where_the_samples_reach(samples):
    many = dm.Batch(samples.inputs.repeat(5, 1, 1, 1) + 0.01 * torch.arange(1100)[:, None, None, None] / 1100, samples.targets.repeat(5))
    scores = dm.score(reconstruction(samples.inputs[:2]), part(samples, slice(0, 2)), auxiliary=part(many, slice(2, 1100)))
    assert [told["gallery"] for told in scores.details["identification"]] == [100, 1000]


def test_a_sample_that_the_server_holds_is_no_decoy_and_without_samples_there_is_no_gallery(samples):
    truth = part(samples, slice(0, 4))
    scores = dm.score(reconstruction(truth.inputs), truth, auxiliary=part(samples, slice(0, 30)))
    assert scores.details["identification"][0]["gallery"] == 30  # 4 private ones and 26 others
    assert scores["identification"].tolist() == [1, 1, 1, 1]
    alone = dm.score(reconstruction(truth.inputs), truth)
    assert "identification" not in alone
    assert "needs auxiliary samples" in alone.unavailable["identification"]


def test_what_is_not_finite_picks_nothing(samples):
    truth, auxiliary = part(samples, slice(0, 2)), part(samples, slice(2, 100))
    scores = dm.score(reconstruction(torch.full_like(truth.inputs, torch.nan)), truth, auxiliary=auxiliary)
    assert scores["identification"].tolist() == [0, 0]
    assert scores.details["identification"][0]["probability"] == 1.0
