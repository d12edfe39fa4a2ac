import numpy as np
import pytest

from dosimeter.report.sections import sections


def table(records, surface):
    (found,) = [section for section in sections(records) if section.surface == surface]
    return found.tables[0]


def test_medians_and_quantiles_agree_with_numpy(single_setting):
    row = table(single_setting, "inputs").rows[0]
    psnr = single_setting[4].metrics["psnr"]
    measure = row.measures[0]
    assert measure.name == "PSNR"
    assert measure.median == f"{np.median(psnr):.1f}\u202fdB"
    assert measure.middle == f"{np.quantile(psnr, 0.25):.1f} – {np.quantile(psnr, 0.75):.1f}\u202fdB"
    nulls = [f"{np.median(null['psnr']):.1f}\u202fdB" for null in single_setting[4].nulls.values()]
    assert [median for median, _ in measure.nulls] == nulls


def test_the_most_telling_metric_comes_first(make_record):
    found = table([make_record("labels", "ilrg", metrics={"clsacc": [1.0], "leacc": [1.0], "insacc": [0.5]})], "labels")
    assert [measure.name for measure in found.rows[0].measures] == ["InsAcc", "ClsAcc", "LeAcc"]
    assert found.spread is False


def test_runs_that_differ_in_their_seed_alone_are_pooled(make_label_record):
    runs = [make_label_record("ilrg", share, share, seed=seed) for seed, share in enumerate((0.2, 0.4, 0.9))]
    (row,) = table(runs, "labels").rows
    assert row.measures[0].median == "40\u202f%"
    assert row.measures[0].interval == "20 – 90\u202f%"
    assert "3 seeds" in row.facts


def test_runs_with_other_options_are_not_pooled(make_record):
    one, two = make_record("labels", "ilrg", metrics={"insacc": [1.0]}), make_record("labels", "ilrg", metrics={"insacc": [0.0]})
    two.config["method"]["steps"] = 1
    assert len(table([one, two], "labels").rows) == 2


def test_a_method_that_does_not_run_has_its_reason_and_no_numbers(single_setting):
    row = table(single_setting, "features").rows[1]
    assert (row.state, row.measures, row.plot, row.evidence) == ("not-attempted", [], None, [])
    assert row.reason == "direct needs a batch of one; this batch has 8"


def test_details_become_sentences(single_setting):
    features, inputs = table(single_setting, "features"), table(single_setting, "inputs")
    assert "8 samples, 1 missed" in features.rows[0].facts
    assert "7 certified from the gradient alone" in features.rows[0].facts
    assert "batch size 8 read off the gradient" in features.rows[0].facts
    assert features.sentences == ["The head’s gradient has rank 8 of at most 10: single samples can be told apart."]
    assert "objective 0.0213, at the truth 7.0×10⁻⁴: the attack stopped short, so it was under-optimised" in inputs.rows[0].facts


@pytest.mark.parametrize(
    ("wrong", "said"), [(0, "3 certified from the gradient alone"), (2, "3 certified from the gradient alone, 2 of them wrongly")]
)
def test_wrong_certificates_are_said(make_record, wrong, said):
    found = make_record("features", "subspace", metrics={"feature_error": [0.1]}, details={"certified": 3, "false_certificates": wrong})
    assert said in table([found], "features").rows[0].facts


def test_metrics_that_could_not_be_computed_are_named(make_record):
    found = make_record("inputs", "dlg", metrics={"psnr": [9.0]}, details={"unavailable": {"lpips": "no weights file"}})
    assert table([found], "inputs").unavailable == [("LPIPS", "no weights file")]


def test_pictures_carry_their_own_scores(single_setting):
    record = single_setting[4]
    sample = table(single_setting, "inputs").rows[0].evidence[2]
    assert [thing.name for thing in sample.shown] == ["private", "recovered", "mean", "nearest known", "foreign gradient"]
    assert sample.shown[1].source == record.evidence[2]["recovered"]
    assert sample.shown[1].score == f"{record.metrics['psnr'][2]:.1f}\u202fdB"
    assert sample.shown[3].score == f"{record.nulls['nearest']['psnr'][2]:.1f}\u202fdB"


@pytest.mark.parametrize("source", ["https://example.org/x.png", "bm90IGEgcG5n", '"><script>', 7, None])
def test_what_is_no_png_is_not_shown(make_record, source):
    evidence = [{"kind": "image", "private": source, "recovered": None, "nulls": {}, "score": None}]
    row = table([make_record("inputs", "dlg", metrics={"psnr": [None]}, evidence=evidence)], "inputs").rows[0]
    assert [thing.source for thing in row.evidence[0].shown] == [None, None]
    assert row.evidence[0].shown[1].score == "miss"


def test_a_crashed_method_has_no_verdict(make_record):
    row = table([make_record("labels", "ilrg", outcome="crashed", reason="crashed with RuntimeError: no")], "labels").rows[0]
    assert (row.verdict, row.state) == ("crashed", "not-measured")
    assert row.facts == ["crashed: stopped by an error, so it says nothing", "1.2\u202fs"]


def test_the_premises_of_a_proof_are_among_its_facts(make_record):
    premises = ["the batch size is 8, as declared", "no defense changed the update"]
    found = make_record("labels", "subspace", metrics={"insacc": [1.0]}, details={"certified": True, "premises": premises})
    said = "what is proved takes for granted: the batch size is 8, as declared; no defense changed the update"
    assert said in table([found], "labels").rows[0].facts
