"""Maps: an audit scores them against what the layer received, judges them, and shows them as tiles."""

import base64
import io
from dataclasses import replace

import pytest
import torch
from PIL import Image
from torch import nn

import dosimeter as dm
from dosimeter.registry import MAPS, MODELS
from dosimeter.surfaces.maps import Maps, as_maps
from dosimeter.surfaces.scores import Comparison
from dosimeter.surfaces.verdicts import Verdict

ONLY_MAPS = {"labels": [], "features": [], "attacks": []}


def convolutional(channels: int = 48) -> nn.Module:
    """Two strided convolutions down to a grid of 2 by 2, and one that keeps it: a gradient that shows up to channels / 4 samples."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(
            *(nn.Conv2d(1, channels, 3, 2, 1), nn.ReLU(), nn.Conv2d(channels, channels, 3, 2, 1), nn.ReLU()),
            *(nn.Conv2d(channels, channels, 3, 1, 1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)),
        ).eval()


def dense() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)).eval()


def first(batch: dm.Batch, count: int, start: int = 0) -> dm.Batch:
    return dm.Batch(batch.inputs[start : start + count], batch.targets[start : start + count])


@pytest.fixture(scope="module")
def seen(digits):
    """The exposure of three digits, the batch, what is recovered from it, and what the layer received."""
    truth = first(digits, 3)
    exposure = dm.observe(convolutional(), truth, auxiliary=first(digits, 60, 100))
    return exposure, truth, dm.recover_maps(exposure), convolutional()[:4](truth.inputs).detach()


@pytest.fixture(scope="module")
def audited(digits):
    (record,) = dm.audit(convolutional(), first(digits, 3), auxiliary=first(digits, 60, 100), maps=["shifts"], **ONLY_MAPS).records
    return record


def test_an_audit_finds_certified_maps_leaked(audited):
    assert (audited.surface, audited.method, audited.outcome, audited.verdict) == ("maps", "shifts", "completed", "leaked")
    assert audited.reason.startswith("3 of 3 samples' activation maps at layer 4 certified")
    assert max(audited.metrics["map_error"]) < 1e-3
    assert set(audited.nulls) == {"mean", "nearest", "foreign"}
    assert min(audited.nulls["nearest"]["map_error"]) > 0.05
    assert {key: audited.details[key] for key in ("certified", "false_certificates", "batch_size", "layer", "shape")} == {
        "certified": 3,
        "false_certificates": 0,
        "batch_size": 3,
        "layer": "4",
        "shape": [48, 2, 2],
    }
    assert Maps().facts(audited.details)[:3] == [
        "the input of layer 4, 48 × 2 × 2 numbers a sample",
        "3 certified from the gradient alone",
        "batch size 3 read off the gradient",
    ]


def test_scores_are_the_relative_errors_of_the_matched_samples(seen):
    exposure, truth, found, true = seen
    scores = dm.score(replace(found, maps=1.25 * true.flip(0).double()), truth, exposure=exposure)
    assert scores.assignment.tolist() == [2, 1, 0]
    assert scores["map_error"].tolist() == pytest.approx([0.25] * 3, rel=1e-4)
    known = convolutional()[:4](exposure.auxiliary.inputs).detach()
    expected = (true - known.mean(0)).flatten(1).norm(dim=1) / true.flatten(1).norm(dim=1)
    assert scores.nulls["mean"]["map_error"].tolist() == pytest.approx(expected.tolist(), rel=1e-5)
    assert dm.score(found, truth, exposure=replace(exposure, auxiliary=None)).nulls["zero"]["map_error"].tolist() == [1.0] * 3


def test_a_forged_certificate_takes_the_verdict_away(seen):
    exposure, truth, found, _ = seen
    judge = Maps().judge
    assert judge(found, dm.score(found, truth, exposure=exposure), 1)[0] is Verdict.LEAKED
    maps = found.maps.clone()
    maps[0] *= 1.05
    forged = replace(found, maps=maps, error_bars=torch.full_like(found.error_bars, 0.5))  # a wide bar allows no more than 1 %
    scores = dm.score(forged, truth, exposure=exposure)
    assert scores.details["false_certificates"] == 1
    verdict, reason = judge(forged, scores, 1)
    assert verdict is Verdict.NOT_SHOWN
    assert "1 of 3 certificates are refuted" in reason
    narrow = replace(found, error_bars=torch.zeros_like(found.error_bars))
    assert dm.score(narrow, truth, exposure=exposure).details["false_certificates"] == 3


def test_uncertified_maps_leak_only_beside_a_foreign_null_and_beyond_luck(seen, digits):
    exposure, truth, found, true = seen
    bare = replace(found, maps=true.double(), certified=torch.zeros(3, dtype=torch.bool))
    other = replace(bare, maps=convolutional()[:4](digits.inputs[40:43]).detach().double())
    alone = dm.score(bare, truth, exposure=exposure, refused={"foreign": "nobody else trains"})
    verdict, reason = Maps().judge(bare, alone, 1)
    assert verdict is Verdict.NOT_SHOWN
    assert reason.endswith("nobody else trains")
    scores = dm.score(bare, truth, exposure=exposure, foreign=other)
    assert scores.details["chance"] < 0.01
    assert Maps().judge(bare, scores, 1)[0] is Verdict.LEAKED
    lucky = replace(scores, details=scores.details | {"chance": 0.06})
    assert Maps().judge(bare, lucky, 1)[0] is Verdict.NOT_SHOWN


def test_a_foreign_null_of_another_layer_is_left_out_and_named(seen):
    exposure, truth, found, true = seen
    elsewhere = replace(found, layer="2", maps=torch.zeros(3, 48, 4, 4))
    scores = dm.score(found, truth, exposure=exposure, foreign=elsewhere)
    assert "foreign" not in scores.nulls
    assert "another layer, 2" in scores.details["refused_nulls"]["foreign"]
    assert "foreign" in dm.score(found, truth, exposure=exposure, foreign=replace(found, maps=0 * true)).nulls


def test_foreign_maps_are_merged_within_the_layer_that_shows_most(seen):
    *_, found, true = seen
    broken = true.clone()
    broken[0, 0, 0, 0] = torch.nan
    merged = Maps().merge([replace(found, layer="2"), replace(found, maps=broken), replace(found, maps=2 * true)], 4)
    assert merged.layer == "4"
    assert torch.equal(merged.maps, torch.cat([true[1:], 2 * true[:2]]))
    assert not merged.certified.any()
    assert merged.premises == ()
    assert Maps().count_guesses(replace(found, maps=broken)) == 2


def test_pictures_are_pngs_with_a_tile_for_each_channel(audited):
    assert len(audited.evidence) == 3
    for row in audited.evidence:
        truth, recovered = (Image.open(io.BytesIO(base64.b64decode(row[name]))) for name in ("private", "recovered"))
        assert truth.format == "PNG"
        assert truth.size == recovered.size == (200, 200)  # four by four maps of 2 by 2, each pixel 24 wide, framed
        assert truth.getpixel((0, 0)) == 255  # the frame
        assert row["score"] < 1e-3
        levels = [list(image.tobytes()) for image in (truth, recovered)]
        assert max(abs(a - b) for a, b in zip(*levels)) <= 1
        assert len(set(levels[0])) > 8


def test_a_sample_without_a_partner_has_no_recovered_picture(seen):
    exposure, truth, found, _ = seen
    partial = replace(found, maps=found.maps[:2], certified=found.certified[:2], error_bars=found.error_bars[:2])
    scores = dm.score(partial, truth, exposure=exposure)
    missing = (scores.assignment < 0).tolist()
    rows = Maps().evidence(partial, Comparison(truth=truth, exposure=exposure), scores)
    assert sum(missing) == scores.misses == 1
    assert [row.recovered is None for row in rows] == missing


def test_a_hidden_linear_layer_is_scored_as_a_grid_of_one_position(digits):
    (record,) = dm.audit(dense(), first(digits, 3), auxiliary=first(digits, 60, 100), maps=["shifts"], **ONLY_MAPS).records
    assert (record.outcome, record.verdict, record.details["shape"]) == ("completed", "leaked", [256, 1, 1])
    assert max(record.metrics["map_error"]) < 1e-3
    assert len(record.evidence) == 3


def test_maps_are_four_axes_and_nothing_else_is_taken_for_them():
    vectors = torch.arange(6.0).reshape(2, 3)
    assert torch.equal(as_maps(vectors, "fc")[:, :, 0, 0], vectors)
    assert as_maps(vectors[:, None], "fc").shape == (2, 3, 1, 1)
    assert as_maps(torch.zeros(2, 3, 4, 5), "conv").shape == (2, 3, 4, 5)
    with pytest.raises(ValueError, match=r"fc: expected .* got \(B, 4, 3\)"):
        as_maps(torch.zeros(2, 4, 3), "fc")


@pytest.mark.parametrize("size", [1, 4])
def test_a_model_without_inner_layers_is_not_attempted(digits, size):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    (record,) = dm.audit(model, first(digits, size), maps=["shifts"], **ONLY_MAPS).records
    assert (record.outcome, record.verdict) == ("not attempted", "not attempted")
    assert "the update has none" in record.reason


@pytest.mark.parametrize("name", ["fcn3", "small_cnn"])
def test_no_audit_of_a_model_of_the_registry_crashes_over_its_maps(digits, name):
    model = MODELS.build(name, channels=1, size=8)
    records = dm.audit(model, first(digits, 4), auxiliary=first(digits, 60, 100), maps="all", **ONLY_MAPS).records
    assert {record.method for record in records} == set(MAPS)
    assert all(record.outcome != "crashed" for record in records), [record.reason for record in records]


def test_what_cannot_be_compared_is_refused(seen):
    exposure, truth, found, _ = seen
    with pytest.raises(ValueError, match="scoring maps needs the exposure"):
        dm.score(found, truth)
    with pytest.raises(ValueError, match=r"found.maps: expected \(n, 48, 2, 2\)"):
        dm.score(replace(found, maps=found.maps[:, :3]), truth, exposure=exposure)
    with pytest.raises(ValueError, match=r"foreign.maps: expected \(n, 48, 2, 2\)"):
        dm.score(found, truth, exposure=exposure, foreign=replace(found, maps=found.maps[:, :3]))


def test_a_record_tells_what_every_layer_allows_and_the_report_what_to_do(audited):
    """Layer 4 has 4 positions a sample and 48 channels, so that 12 samples fit; its spectrum shows the 12 positions of three."""
    layer = next(one for one in audited.details["layers"] if one["name"] == "4")
    assert (layer["positions"], layer["channels"], layer["largest_batch"], layer["positions_seen"]) == (4, 48, 12, 12)
    assert layer["gap"] > 100
    assert audited.details["joined"]["labels"]
    facts = Maps().facts(audited.details)
    assert any(
        fact.startswith("4: 4 positions a sample, 48 channels, room for 12 samples, 12 positions seen before a gap of") for fact in facts
    )
    assert "0 and 1 layer like it, no room for a sample: a stride above 1 leaves" in " ".join(facts)
    assert Maps().facts({"layers": []}) == []


def test_the_advice_has_the_limit_of_the_batch_and_a_noise_that_stops_the_maps(audited):
    batch, noise = Maps().advice([audited.details])
    assert batch.startswith("A batch of more than 12 samples")
    assert Maps().advice([{"layers": []}]) == Maps().advice([]) == []
    strongest = max(one["hiding_noise"] for one in audited.details["layers"])
    assert f"standard deviation of {strongest:.1g} on each entry" in noise


def test_the_noise_that_is_advised_stops_the_maps_and_much_less_does_not(audited, digits):
    strongest = max(one["hiding_noise"] for one in audited.details["layers"])
    for factor, stopped in ((1.0, True), (1 / 300, False)):
        exposure = dm.observe(convolutional(), first(digits, 3), defenses=(dm.defense("gaussian_noise", std=factor * strongest),))
        try:
            found = dm.recover_maps(exposure)
        except dm.Refused:
            assert stopped
        else:
            assert not stopped
            assert len(found.maps) == 3


def test_a_refused_record_tells_what_every_layer_allows_too(digits):
    (record,) = dm.audit(convolutional(), first(digits, 14), maps=["shifts"], **ONLY_MAPS).records
    assert record.outcome == "not attempted"
    layer = next(one for one in record.details["layers"] if one["name"] == "4")
    assert (layer["positions"], layer["channels"], layer["largest_batch"]) == (4, 48, 12)
    assert "14 samples have 56 positions" in layer["reason"]
    assert any("room for 12 samples; 14 samples have 56 positions" in fact for fact in Maps().facts(record.details))
