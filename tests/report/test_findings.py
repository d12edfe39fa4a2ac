from dosimeter.report import render
from dosimeter.report.findings import findings, headline, verdict_matrix, warnings


def test_a_surface_that_nobody_looked_at_is_said_to_be_unmeasured(make_label_record):
    found = findings([make_label_record("ilrg", 1.0, 1.0, verdict="leaked", reason="proved")])
    assert [(f.surface, f.state) for f in found] == [
        ("labels", "leaked"),
        ("features", "not-measured"),
        ("maps", "not-measured"),
        ("inputs", "not-measured"),
    ]
    assert headline(found) == "Labels leaked; features, maps and inputs not measured."


def test_the_premises_of_a_proof_stand_beside_its_verdict(make_record):
    premises = ["the batch size is 8, as declared", "no defense changed the update"]
    scores, known = {"insacc": [1.0]}, {"certified": True, "premises": premises}
    proved = make_record("labels", "subspace", verdict="leaked", reason="proved", metrics=scores, details=known)
    (labels,) = [finding for finding in findings([proved]) if finding.surface == "labels"]
    assert labels.premises == "what is proved takes for granted: the batch size is 8, as declared; no defense changed the update"
    assert (
        "the batch size is 8, as declared; no defense changed the update."
        in render([proved]).partition('class="finding leaked')[2].partition("</article>")[0]
    )
    scored = make_record("labels", "ilrg", verdict="leaked", reason="luck is refuted", metrics=scores)
    assert not [finding.premises for finding in findings([scored]) if finding.premises]


def test_a_regression_has_targets_in_place_of_labels(make_record):
    targets = make_record("targets", "head_slopes", metrics={"target_error": [0.0]}, verdict="leaked", reason="proved")
    features = make_record("features", "head_slopes", verdict="not shown at this budget", reason="no closer than its nulls")
    found = findings([features, targets])
    assert [(f.surface, f.state) for f in found] == [
        ("targets", "leaked"),
        ("features", "not-shown"),
        ("maps", "not-measured"),
        ("inputs", "not-measured"),
    ]
    assert headline(found).startswith("Targets leaked; no leak of features shown")


def test_the_gravest_verdict_leads_with_its_method_and_setting(audit_records):
    labels, features, _, inputs = findings(audit_records)
    assert (labels.state, labels.method, labels.setting) == ("leaked", "ilrg", "no defense")
    assert (features.state, features.method) == ("leaked", "subspace")
    assert (inputs.state, inputs.method) == ("leaked", "inverting_gradients")
    assert headline([labels, features, inputs]) == "Labels, features and inputs leaked."


def test_not_shown_and_impossible_are_never_called_safe(make_record):
    found = findings(
        [
            make_record("labels", "ilrg", verdict="not shown at this budget", reason="as good as guessing"),
            make_record("features", "direct", verdict="impossible here", reason="zeros", details={"theorem": "zero is zero"}),
        ]
    )
    assert headline(found) == "No leak of labels shown at this budget; recovery of features impossible here; maps and inputs not measured."
    assert "no proof" in found[0].meaning
    assert "Another setting may open" in found[1].meaning


def test_what_was_not_attempted_does_not_read_as_safe(make_record):
    refused = make_record("features", "direct", verdict="not attempted", outcome="not attempted", reason="batch of 8")
    unproved = make_record("inputs", "dlg", verdict="impossible here", outcome="impossible", reason="no head")
    labels = make_record("labels", "ilrg", verdict="not shown at this budget", reason="as good as guessing")
    found = findings([labels, refused, unproved])
    assert [finding.state for finding in found] == ["not-shown", "not-attempted", "not-measured", "not-attempted"]
    assert headline(found) == (
        "Nothing tried on features and inputs, which says nothing about safety; no leak of labels shown at this budget; maps not measured."
    )
    assert "says nothing about safety" in found[1].meaning


def test_the_headline_says_that_attacks_were_under_optimised(make_record):
    short = make_record(
        "inputs", "dlg", metrics={"psnr": [5.0]}, verdict="not shown at this budget", details={"objective": 2.0, "objective_at_truth": 1.0}
    )
    labels = make_record("labels", "ilrg", verdict="not shown at this budget", reason="as good as guessing")
    assert headline(findings([short, labels])) == (
        "No leak of inputs shown at this budget by attacks that were under-optimised, so more steps may show more; "
        "no leak of labels shown at this budget; features and maps not measured."
    )


def test_matrix_has_the_verdict_of_each_setting(audit_records):
    (bare, first), (noisy, second) = verdict_matrix(audit_records)
    assert (bare, noisy) == ("no defense", "gaussian_noise (std 0.1)")
    assert first["labels"] == ("leaked", "leaked")
    assert second["labels"] == ("not shown at this budget", "not-shown")
    assert "features" not in second


def test_a_warning_stands_once_with_all_its_methods(audit_records):
    assert warnings(audit_records)[1][1] == ["inverting_gradients", "dlg"]


def test_a_crash_is_neither_a_leak_nor_the_absence_of_one(make_record):
    crash = make_record("labels", "ilrg", outcome="crashed", verdict="not shown at this budget", reason="crashed with RuntimeError: no")
    labels, *_ = findings([crash])
    assert (labels.state, labels.verdict) == ("not-measured", "not measured")
    assert labels.meaning.startswith("Every method on this surface was stopped by an error")
    assert warnings([crash]) == [("stopped by an error, so it says nothing: crashed with RuntimeError: no", ["ilrg"])]
    impossible = make_record(
        "labels", "idlg", verdict="impossible here", outcome="impossible", reason="zeros", details={"theorem": "zero is zero"}
    )
    assert findings([crash, impossible])[0].state == "impossible"
