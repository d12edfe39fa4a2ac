"""Inputs: scores in pixels, the nulls, the 3 dB rule, the verdict, and what the record holds."""

import math
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage.metrics import peak_signal_noise_ratio

import dosimeter as dm
from dosimeter.interfaces import Attack
from dosimeter.normalization import from_pixels
from dosimeter.runs.gate import parse_condition
from dosimeter.surfaces.inputs import MARGIN_DB, Inputs, beats_nulls, judge_inputs
from dosimeter.surfaces.intervals import summarize
from dosimeter.surfaces.scores import Comparison, Scores
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Reconstruction


def first(batch: dm.Batch, count: int, start: int = 0) -> dm.Batch:
    return dm.Batch(batch.inputs[start : start + count], batch.targets[start : start + count])


def reconstruction(inputs: torch.Tensor, **options) -> dm.Reconstruction:
    return dm.Reconstruction(inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.int64), objective=0.0, **options)


def test_bare_scores_are_a_mapping_in_the_truths_order(digits, rng):
    truth = first(digits, 8)
    order = torch.randperm(8, generator=rng)
    recovered = truth.inputs[order] + 0.1 * torch.randn(8, 1, 8, 8, generator=rng)
    scores = dm.score(reconstruction(recovered), truth)
    assert isinstance(scores, Scores)
    assert set(scores) == {"psnr", "ssim", "mse"}
    assert scores.assignment.tolist() == order.argsort().tolist()
    back = recovered[order.argsort()]
    expected = [peak_signal_noise_ratio(t.double().numpy(), r.double().numpy(), data_range=1.0) for t, r in zip(truth.inputs, back)]
    assert scores["psnr"].tolist() == pytest.approx(expected, abs=1e-4)
    assert scores["mse"].tolist() == pytest.approx((back - truth.inputs).square().flatten(1).mean(1).tolist(), rel=1e-5)
    assert set(scores.unavailable) == {"lpips", "registered_lpips", "identification"}  # the last needs auxiliary samples
    assert scores.misses == 0
    assert scores.warnings == ()


def test_an_exact_hit_in_any_order_scores_the_cap_everywhere(digits):
    truth = first(digits, 6)
    scores = dm.score(reconstruction(truth.inputs.flip(0)), truth)
    assert scores["psnr"].tolist() == [100.0] * 6
    assert scores["mse"].tolist() == [0.0] * 6
    assert scores["ssim"].tolist() == pytest.approx([1.0] * 6, abs=1e-6)


def test_both_sides_are_unnormalised(digits, rng):
    normalization = dm.Normalization(mean=(0.3,), std=(0.2,))
    truth = first(digits, 5)
    recovered = truth.inputs + 0.1 * torch.randn(5, 1, 8, 8, generator=rng)
    plain = dm.score(reconstruction(recovered), truth)
    scaled_truth = dm.Batch(from_pixels(truth.inputs, normalization), truth.targets)
    scaled = from_pixels(recovered, normalization)
    auxiliary = first(digits, 30, 100)
    scaled_auxiliary = dm.Batch(from_pixels(auxiliary.inputs, normalization), auxiliary.targets)
    for scores in (
        dm.score(reconstruction(scaled, normalization=normalization), scaled_truth, auxiliary=scaled_auxiliary),
        dm.score(reconstruction(scaled), scaled_truth, normalization=normalization, auxiliary=scaled_auxiliary),
    ):
        assert scores["psnr"].tolist() == pytest.approx(plain["psnr"].tolist(), abs=1e-3)
        expected = dm.score(reconstruction(recovered), truth, auxiliary=auxiliary).nulls["nearest"]["psnr"]
        assert scores.nulls["nearest"]["psnr"].tolist() == pytest.approx(expected.tolist(), abs=1e-3)


def test_nulls_are_the_mean_the_nearest_and_the_foreign(digits, rng):
    truth, auxiliary, other = first(digits, 6), first(digits, 40, 50), first(digits, 6, 120)
    recovered, foreign = (reconstruction(batch.inputs[torch.randperm(6, generator=rng)]) for batch in (truth, other))
    scores = dm.score(recovered, truth, auxiliary=auxiliary, foreign=foreign)
    assert set(scores.nulls) == {"mean", "nearest", "foreign"}
    true, public = truth.inputs.double().numpy(), auxiliary.inputs.double().numpy()
    assert scores.nulls["mean"]["mse"].tolist() == pytest.approx(np.mean((true - public.mean(0)) ** 2, axis=(1, 2, 3)).tolist(), rel=1e-5)
    every = np.mean((true[:, None] - public[None]) ** 2, axis=(2, 3, 4))  # (B, N)
    assert scores.nulls["nearest"]["mse"].tolist() == pytest.approx(every.min(1).tolist(), rel=1e-5)
    assert scores.nulls["foreign"]["mse"].tolist() == pytest.approx(dm.score(foreign, truth)["mse"].tolist())
    for null in scores.nulls.values():
        assert set(null) == set(scores)
        assert float(scores["psnr"].median()) > float(null["psnr"].median()) + 1


def test_without_auxiliary_data_the_null_is_mid_gray(digits):
    truth = first(digits, 4)
    scores = dm.score(reconstruction(truth.inputs), truth)
    assert list(scores.nulls) == ["gray"]
    assert scores.nulls["gray"]["mse"].tolist() == pytest.approx((truth.inputs - 0.5).square().flatten(1).mean(1).tolist(), rel=1e-5)


def test_a_constant_image_does_not_beat_its_nulls(digits):
    truth, auxiliary = first(digits, 16), first(digits, 100, 100)
    constant = auxiliary.inputs.mean(0, keepdim=True).repeat(16, 1, 1, 1)
    scores = dm.score(reconstruction(constant), truth, auxiliary=auxiliary)
    assert float(scores["psnr"].median()) > 10  # the number that is often read as leakage
    assert Inputs().judge(reconstruction(constant), scores, attempts=1)[0] is Verdict.NOT_SHOWN


def test_fewer_recovered_than_true_are_misses(digits):
    truth = first(digits, 5)
    scores = dm.score(reconstruction(truth.inputs[[4, 1]]), truth)
    assert scores.assignment.tolist() == [-1, 1, -1, -1, 0]
    assert scores.misses == 3
    assert scores["psnr"].isnan().tolist() == [True, False, True, True, False]
    assert summarize(scores["psnr"], True).median is None


def test_what_is_not_finite_is_missed_and_what_is_huge_is_worthless(digits):
    truth = first(digits, 4)
    recovered = truth.inputs.clone()
    recovered[0] = torch.nan
    recovered[1, 0, 3, 3] = torch.inf
    scores = dm.score(reconstruction(recovered), truth, auxiliary=first(digits, 10, 50))
    assert scores.assignment.tolist() == [-1, -1, 2, 3]
    assert scores["psnr"].isnan().tolist() == [True, True, False, False]
    everything = dm.score(reconstruction(torch.full_like(recovered, torch.nan)), truth)
    assert everything.misses == 4
    huge = dm.score(reconstruction(1e30 * truth.inputs), truth)
    assert float(huge["psnr"].max()) < -500
    assert float(huge["ssim"].max()) < float(huge.nulls["gray"]["ssim"].max())


def test_more_recovered_than_true_are_matched_to_the_best(digits):
    truth = first(digits, 3)
    recovered = torch.cat([torch.zeros(2, 1, 8, 8), truth.inputs, torch.ones(1, 1, 8, 8)])
    scores = dm.score(reconstruction(recovered), truth)
    assert scores.assignment.tolist() == [2, 3, 4]
    assert scores["psnr"].tolist() == [100.0] * 3


def test_auxiliary_data_that_hold_the_truth_are_told(digits):
    truth = first(digits, 4)
    scores = dm.score(reconstruction(truth.inputs), truth, auxiliary=first(digits, 20, 2))
    assert scores.warnings == ("2 of 4 private samples are in the auxiliary data too, so that their nearest null is exact",)


def test_a_truth_that_is_not_in_pixels_is_told(digits):
    truth = dm.Batch(4 * digits.inputs[:2] - 2, digits.targets[:2])
    (warning,) = dm.score(reconstruction(truth.inputs), truth).warnings
    assert warning.startswith("true pixels reach from -2 to 2")


def test_inputs_that_are_no_images_have_no_ssim():
    inputs = torch.rand(4, 20, generator=torch.Generator().manual_seed(1))
    scores = dm.score(reconstruction(inputs), dm.Batch(inputs, torch.zeros(4, dtype=torch.int64)))
    assert set(scores) == {"psnr", "mse"}
    assert "got samples of shape (20,)" in scores.unavailable["ssim"]


def test_chosen_metrics_alone_are_computed_and_the_inputs_stay_as_they_are(digits):
    truth = first(digits, 3)
    before = truth.inputs.clone()
    scores = dm.score(reconstruction(truth.inputs), truth, metrics=["mse"])
    assert list(scores) == ["mse"]
    assert scores.unavailable == {}
    assert torch.equal(truth.inputs, before)


def test_lpips_is_scored_where_its_weights_are(shared_data, monkeypatch):
    weights = shared_data / "weights" / "lpips_alex_v0.1_full_fp32.pth"
    if not weights.is_file():
        pytest.skip(f"no LPIPS weights at {weights}")
    monkeypatch.setenv("DOSIMETER_LPIPS_WEIGHTS", str(weights))
    inputs = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(2))
    scores = dm.score(reconstruction(inputs), dm.Batch(inputs, torch.zeros(3, dtype=torch.int64)))
    assert scores["lpips"].tolist() == [0.0] * 3
    assert float(scores.nulls["gray"]["lpips"].min()) > 0.1


def test_what_cannot_be_compared_is_refused(digits):
    truth, found = first(digits, 2), reconstruction(digits.inputs[:2])
    with pytest.raises(ValueError, match=r"found.inputs: expected samples of shape"):
        dm.score(reconstruction(torch.zeros(2, 3, 4, 4)), truth)
    with pytest.raises(ValueError, match="expected 1 or 1 means and stds"):
        dm.score(found, truth, normalization=dm.Normalization(mean=(0.1, 0.2), std=(1.0, 1.0)))
    with pytest.raises(ValueError, match="NaN or infinite inputs"):
        dm.score(found, dm.Batch(truth.inputs * math.nan, truth.targets))


@pytest.mark.parametrize(
    ("psnr", "rivals", "beats"),
    [
        (20 + MARGIN_DB, [20.0, 9.0], True),
        (19.9 + MARGIN_DB, [20.0, 9.0], False),
        (30.0, [None, math.nan, 20.0], True),
        (None, [20.0], False),
        (math.nan, [20.0], False),
        (90.0, [], False),
        (90.0, [None], False),
    ],
)
def test_an_input_beats_its_nulls_by_the_margin_and_never_without_a_null(psnr, rivals, beats):
    assert beats_nulls(psnr, rivals) is beats
    assert Inputs().beats_nulls(psnr, rivals) is beats


@given(st.lists(st.tuples(st.floats(0, 60), st.floats(0, 60), st.floats(0, 60)), min_size=1, max_size=8))
def test_the_verdict_counts_the_inputs_that_beat_their_nulls(rows):
    nulls = {"mean": {"psnr": [row[1] for row in rows]}, "foreign": {"psnr": [row[2] for row in rows]}}
    verdict, reason = judge_inputs({"psnr": [row[0] for row in rows]}, nulls, chance=0.01)
    marked = sum(beats_nulls(value, rivals) for value, *rivals in rows)
    assert (verdict == Verdict.LEAKED) == (marked > 0)
    assert not marked or reason.startswith(f"{marked} of {len(rows)} ")


def test_inputs_leak_where_one_picture_beats_each_of_its_own_nulls():
    nulls = {"mean": {"psnr": [10.0, 10.0]}, "foreign": {"psnr": [20.0, 12.0]}}
    verdict, reason = judge_inputs({"psnr": [22.9, 15.0]}, nulls, chance=0.01)
    assert verdict == Verdict.LEAKED
    assert reason.startswith("1 of 2 inputs beat every null by 3 dB or more")
    assert judge_inputs({"psnr": [22.9, 14.9]}, nulls, chance=0.01)[0] == Verdict.NOT_SHOWN
    assert judge_inputs({"psnr": [None, math.nan]}, nulls, chance=0.01)[0] == Verdict.NOT_SHOWN


def test_inputs_leak_only_beyond_luck_and_beside_a_foreign_null():
    nulls = {"mean": {"psnr": [10.0, 10.0]}, "foreign": {"psnr": [9.0, 12.0]}}
    close = {"psnr": [25.0, 15.0]}
    assert judge_inputs(close, nulls, chance=0.005, attempts=10)[0] == Verdict.LEAKED
    verdict, reason = judge_inputs(close, nulls, chance=0.006, attempts=10)
    assert verdict == Verdict.NOT_SHOWN
    assert reason.endswith("by luck with probability 0.06, counting 10 methods tried, so this batch does not tell a leak from luck")
    del nulls["foreign"]
    verdict, reason = judge_inputs(close, nulls, chance=0.0)
    assert verdict == Verdict.NOT_SHOWN
    assert reason.endswith("without a null of the same kind: the same method was not run on a foreign gradient")


def test_other_clients_pictures_leak_nothing_and_the_own_ones_leak(digits):
    truth, other, auxiliary = first(digits, 4), first(digits, 4, 40), first(digits, 60, 100)
    for known in (auxiliary, None):
        for guessed, expected in ((truth, Verdict.LEAKED), (other, Verdict.NOT_SHOWN)):
            found = reconstruction(guessed.inputs)
            scores = dm.score(found, truth, auxiliary=known, foreign=reconstruction(first(digits, 4, 60).inputs))
            assert Inputs().judge(found, scores, attempts=9)[0] is expected


def test_foreign_pictures_are_merged_to_the_number_of_guesses_and_more_do_not_help(digits):
    truth, other = first(digits, 4), first(digits, 8, 40)
    merged = Inputs().merge([reconstruction(other.inputs[:3]), reconstruction(other.inputs[3:])], 4)
    assert torch.equal(merged.inputs, other.inputs[:4])
    assert Inputs().count_guesses(merged) == 4
    few, many = (dm.score(reconstruction(truth.inputs), truth, foreign=reconstruction(other.inputs[:n])) for n in (4, 8))
    assert torch.equal(few.nulls["foreign"]["psnr"], many.nulls["foreign"]["psnr"])


def test_inputs_that_did_not_come_back_are_counted_and_not_averaged():
    verdict, reason = judge_inputs({"psnr": [30.0, math.nan, 28.0, None]}, {"foreign": {"psnr": [12.0, 12.0, 14.0, 12.0]}}, chance=0.01)
    assert verdict is Verdict.LEAKED
    assert reason.startswith(
        "2 of 4 inputs beat every null by 3 dB or more; 2 came back, median PSNR 29.0 dB against 13.0 dB of each input's best null"
    )
    nothing = judge_inputs({"psnr": [math.nan] * 3}, {"foreign": {"psnr": [12.0] * 3}}, chance=0.01)
    assert nothing == (Verdict.NOT_SHOWN, "none of 3 inputs came back")


def test_a_lower_objective_at_the_truth_is_a_shortfall():
    (said,) = Inputs().shortfalls({"objective": 0.2, "objective_at_truth": 0.1})
    assert said.startswith("under-optimised")
    assert Inputs().shortfalls({"objective": 0.1, "objective_at_truth": 0.2}) == []
    assert Inputs().shortfalls({"objective": 0.1}) == []
    assert Inputs().facts({"objective": 0.2, "objective_at_truth": 0.1})[0].startswith("objective 0.200, at the truth 0.100: the attack")


def test_what_is_no_picture_is_a_table_of_columns():
    flat = torch.rand(2, 20)
    truth = dm.Batch(flat, torch.zeros(2, dtype=torch.int64))
    found = reconstruction(flat.flip(0))
    shown = Inputs().evidence(found, Comparison(truth=truth), dm.score(found, truth))
    assert [(one.kind, one.sample) for one in shown] == [("table", 0), ("table", 1)]
    assert shown[1].private == shown[1].recovered
    assert list(shown[1].private) == [f"column {i}" for i in range(1, 21)]
    assert float(shown[1].private["column 3"]) == pytest.approx(float(flat[1, 2]), rel=5e-3)


@dataclass(frozen=True, kw_only=True)
class Claimant(Attack):
    """Claims to have proved what it says, right or wrong."""

    said: tuple[float, ...]  # gray levels of the inputs

    def __call__(self, exposure, labels, rng) -> Reconstruction:
        inputs = torch.stack([torch.full(exposure.public.input_shape, level) for level in self.said])
        return Reconstruction(inputs=inputs, labels=torch.zeros(len(inputs), dtype=torch.int64), objective=0.0, premises=("honesty",))


def test_a_claim_that_the_truth_refutes_is_no_leak_and_passes_no_gate(classifier):
    grays = torch.tensor([0.2, 0.4, 0.8]).view(3, 1, 1, 1).expand(3, 1, 8, 8).clone()
    truth = dm.Batch(grays, torch.tensor([1, 2, 3]))
    for said, false in (((0.2, 0.4, 0.8), 0), ((0.2, 0.405), 0), ((0.2, 0.6), 1), ((0.2, 0.2, 0.2, 0.2), 1), ((0.3, 0.5, 0.6), 3)):
        report = dm.audit(classifier, truth, labels=[], features=[], maps=[], attacks=[Claimant(said=said)])
        (record,) = report.records
        assert record.details["false_certificates"] == false, said
        assert ("refuted by the truth" in record.reason) == (false > 0)
        assert record.verdict == "not shown at this budget" or false == 0
        assert bool(parse_condition("leaked").why_untested(report.records)) == (false > 0)


def test_private_samples_refute_no_claim_about_what_replaced_them(classifier, digits):
    measured = dm.audit(
        classifier, first(digits, 6), labels=[], features=[], maps=[], attacks=[Claimant(said=(0.5,) * 6)], defenses=["mixup"]
    )
    (record,) = measured.records
    assert "false_certificates" not in record.details


@pytest.mark.parametrize("null", ["gray", "nearest"])
def test_a_single_input_leaks_under_an_assumption_that_auxiliary_samples_test(null):
    def said(count):
        nulls = {null: {"psnr": [10.0] * count}, "foreign": {"psnr": [9.0] * count}}
        verdict, reason = judge_inputs({"psnr": [60.0] * count}, nulls, chance=1e-6)
        assert verdict == "leaked"
        return "auxiliary samples would test it" in reason

    assert said(1) == (null == "gray")
    assert not said(2)
