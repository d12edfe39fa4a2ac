"""The top of the page: what leaked stands there, private beside recovered, the worst first, and never without its reason."""

import dataclasses

from dosimeter.report import render
from dosimeter.report.decision import in_plain_words, what_now, what_to_do
from dosimeter.report.evidence import exhibits, pieces_of
from dosimeter.report.findings import findings, headline, headline_parts
from dosimeter.report.tradeoff import tradeoff

LABELS = {"kind": "table", "private": {"class 1": "2"}, "recovered": {"class 1": "1", "class 4": "1"}, "caption": "samples of each class"}


def test_what_leaked_stands_first_and_what_is_closest_to_the_sample_before_the_rest(single_setting):
    records = [dataclasses.replace(r, evidence=[LABELS]) if r.surface == "labels" else r for r in single_setting]
    shown = exhibits(findings(records), records)
    assert [(one.finding.surface, one.finding.state) for one in shown] == [("inputs", "leaked"), ("labels", "leaked")]
    hidden = [dataclasses.replace(r, verdict="not shown at this budget") if r.surface == "inputs" else r for r in records]
    assert [one.finding.surface for one in exhibits(findings(hidden), hidden)] == ["labels", "inputs"]


def test_the_sample_that_leaked_most_is_shown_first(single_setting):
    record = next(r for r in single_setting if r.method == "inverting_gradients")
    (shown,) = exhibits(findings([record]), [record])
    nulls = [null["psnr"] for null in record.nulls.values()]
    best = max(range(len(record.metrics["psnr"])), key=lambda i: record.metrics["psnr"][i] - max(null[i] for null in nulls))
    assert shown.pieces[0].title == f"Sample {best + 1}"
    assert [thing.name for thing in shown.pieces[0].pair] == ["private", "recovered"]
    assert shown.note == "what leaked most of 8 samples"
    assert shown.legend == "what leaked most of 8 samples; in a red frame what comes closer than any guess without the update"
    by_eye = dataclasses.replace(record, metrics=record.metrics | {"ssim": [float(i == 5) for i in range(8)]})
    order = exhibits(findings([by_eye]), [by_eye])[0].pieces
    assert order[0].title == "Sample 6" or not order[0].beats
    flat = {"psnr": [40.0, *record.metrics["psnr"][1:]]}
    guessed = {name: null | {"psnr": [39.9, *null["psnr"][1:]]} for name, null in record.nulls.items()}
    anyone = dataclasses.replace(record, metrics=record.metrics | flat, nulls=guessed)
    assert exhibits(findings([anyone]), [anyone])[0].pieces[0].title != "Sample 1", "a picture that guesses resemble as much shows nothing"


def test_a_table_sets_the_columns_beside_one_another(make_record):
    record = make_record("labels", "ilrg", metrics={"insacc": [0.5]}, evidence=[LABELS])
    (piece,) = pieces_of(record)
    assert piece.columns == ["private", "recovered"]
    assert piece.rows == [("class 1", ["2", "1"]), ("class 4", ["–", "1"])]
    assert piece.title == "samples of each class"


def test_without_a_truth_only_what_was_recovered_is_shown(make_record):
    text = {"kind": "text", "recovered": "my secret", "sample": 0}
    record = make_record("inputs", "dlg", evidence=[text], verdict="leaked", reason="proved")
    (piece,) = pieces_of(record)
    assert [(thing.name, thing.source, thing.score) for thing in piece.shown] == [("recovered", "my secret", "")]
    assert "the samples were not at hand" in in_plain_words(findings([record]), [record])
    assert "<blockquote>my secret</blockquote>" in render([record])


def test_every_verdict_has_its_reason_in_the_same_line(make_label_record):
    reason = "100% of the labels recovered (InsAcc), guessing gives 27%; luck does as well in 9% of draws"
    page = render([make_label_record("ilrg", 1.0, 1.0, verdict="not shown at this budget", reason=reason)])
    assert f"Not shown at this budget: {reason}" in page


def test_the_paragraph_says_what_leaked_what_it_rests_on_and_what_stays_open(single_setting, make_record):
    said = in_plain_words(findings(single_setting), single_setting)
    assert "from 8 private samples" in said
    assert "The server can rebuild private samples" in said
    assert "compared with the private samples themselves" in said
    assert "On maps no method gave an answer, so nothing is known there." in said
    dull = make_record("labels", "ilrg", verdict="not shown at this budget", reason="as guessing")
    leaked = make_record("inputs", "dlg", verdict="leaked", reason="")
    untried = make_record("maps", "shifts", verdict="not attempted", outcome="not attempted", reason="no room")
    said = in_plain_words(findings([dull, leaked, untried]), [dull, leaked, untried])
    assert "For labels no leak was shown, which does not mean safe. On features and maps no method gave an answer" in said
    nothing = [make_record("labels", "ilrg", reason="as guessing")]
    said = in_plain_words(findings(nothing), nothing)
    assert "no proof that nothing can" in said
    assert "protect" not in said


def test_the_paragraph_tells_what_is_nearest_to_the_samples_first_and_membership_last(make_record):
    leaked = [make_record(surface, "any", verdict="leaked", reason="") for surface in ("membership", "labels", "inputs")]
    said = in_plain_words(findings(leaked), leaked)
    assert said.index("rebuild private samples") < said.index("what kinds of samples") < said.index("whether this client trained on it")


def test_what_only_optional_surfaces_leave_open_leads_no_headline(make_record):
    tried = [make_record(surface, "any", verdict="not shown at this budget", reason="") for surface in ("labels", "features", "inputs")]
    refused = {"verdict": "not attempted", "outcome": "not attempted", "reason": ""}
    untried = [make_record(surface, "any", **refused) for surface in ("maps", "membership")]
    first, others = headline_parts(findings([*tried, *untried]))
    assert first == "No leak of labels, features and inputs shown at this budget."
    assert others == "Nothing tried on maps and membership, which says nothing about safety."
    first, _ = headline_parts(findings([*tried[:2], make_record("inputs", "dlg", **refused)]))
    assert first == "Nothing tried on inputs, which says nothing about safety."


def test_a_sample_keeps_its_number_wherever_it_stands(make_record):
    shown = [{"kind": "text", "recovered": "b", "sample": 3}, {"kind": "text", "recovered": "a", "sample": 0}]
    assert [piece.title for piece in pieces_of(make_record("inputs", "dlg", evidence=shown))] == ["Sample 4", "Sample 1"]


def test_the_paragraph_on_several_defenses_says_that_it_tells_the_worst(grid_records, single_setting):
    attacks = [record for record in grid_records if record.surface != "utility"]
    assert "in 3 ways, without and behind defenses, and the worst of them is told here." in in_plain_words(findings(attacks), attacks)
    assert "the worst of them" not in in_plain_words(findings(single_setting), single_setting)


def test_the_advice_has_a_price_or_says_how_to_get_one(single_setting, grid_records):
    assert "dosimeter audit --defenses all" in what_to_do(findings(single_setting), single_setting, None)
    costs = tradeoff(grid_records)
    attacks = [record for record in grid_records if record.surface != "utility"]
    assert what_to_do(findings(attacks), attacks, costs) == costs.advice


def test_the_first_screen_says_what_to_do_next(single_setting, grid_records, make_record):
    page = render(single_setting)
    step = page[page.index('class="next"') :]
    assert "<code>dosimeter audit --defenses all</code>" in step[: step.index("</p>")]
    assert page.index('class="next"') < page.index('class="exhibits"')
    costs = tradeoff(grid_records)
    attacks = [record for record in grid_records if record.surface != "utility"]
    said = what_now(findings(attacks), costs)
    assert costs.advice.startswith(said)
    assert said.startswith("Switch on")
    nothing = [make_record("labels", "ilrg", reason="as guessing")]
    assert what_now(findings(nothing), None).startswith("Do not call the update safe")
    assert what_now([], None) == ""


def test_a_surface_that_leaked_advises_from_its_own_records(make_record):
    layer = {"name": "conv", "largest_batch": 6, "hiding_noise": 2e-5, "hiding_share": 0.01}
    leaked = make_record("maps", "shifts", verdict="leaked", reason="", details={"layers": [layer]})
    said = what_to_do(findings([leaked]), [leaked], None)
    assert "A batch of more than 6 samples" in said
    other = make_record("maps", "cocktail_party", reason="", details={"layers": [layer | {"name": "fc", "largest_batch": 4}]})
    said = what_to_do(findings([leaked, other]), [leaked, other], None)
    assert "A batch of more than 6 samples" in said  # the largest of all layers, whichever method read them
    assert said.count("A batch of more than") == 1
    assert "Noise with a standard deviation of 2e-05 on each entry, 0.0100 of an entry" in said
    assert "nothing more to advise yet" in said


def test_the_gravest_verdict_is_the_headline_and_the_others_follow(single_setting):
    found = findings(single_setting)
    first, others = headline_parts(found)
    assert first == "Labels, features and inputs leaked."
    assert others.endswith("maps not measured.") or others == "Maps not measured."
    assert headline(found) == f"{first[:-1]}; {others[0].lower()}{others[1:]}"


def test_the_top_of_the_page_shows_private_beside_recovered_and_the_details_the_nulls_too(make_record):
    table = {"kind": "table", "private": {"age": "31"}, "recovered": {"age": "30"}, "nulls": {"foreign": {"age": "52"}}, "sample": 0}
    record = make_record("inputs", "dlg", metrics={"psnr": [30.0]}, nulls={"foreign": {"psnr": [9.0]}}, evidence=[table])
    (exhibit,) = exhibits(findings([record]), [record])
    assert exhibit.pieces[0].columns == ["private", "recovered"]
    assert exhibit.pieces[0].rows == [("age", ["31", "30"])]
    assert pieces_of(record)[0].rows == [("age", ["31", "30", "52"])]


def test_a_text_stands_beside_the_score_of_its_own_metric(make_record):
    texts = [{"kind": "text", "private": "1 2", "recovered": "1 3", "sample": i, "score": value} for i, value in enumerate((0.5, 1.0))]
    metrics, guessed = {"token_f1": [1.0], "rouge1": [0.5, 1.0]}, {"unigram": {"token_f1": [0.1], "rouge1": [0.2, 0.2]}}
    record = make_record("tokens", "dager", metrics=metrics, nulls=guessed, verdict="leaked", evidence=texts)
    record.threat_model["inputs"] = "token ids"
    (shown,) = exhibits(findings([record]), [record])
    assert [(piece.title, piece.pair[1].score) for piece in shown.pieces] == [
        ("Sample 2", "ROUGE-1 100\u202f%"),
        ("Sample 1", "ROUGE-1 50\u202f%"),
    ]
    assert shown.note == "what leaked most of 2 samples"
    assert shown.legend.startswith("all 2 samples, what leaked most first")


def test_premises_that_two_surfaces_share_stand_once(make_record):
    premises = {"certified": True, "premises": ["one gradient", "no defense"]}
    records = [
        make_record("labels", "subspace", metrics={"insacc": [1.0]}, verdict="leaked", details=premises, evidence=[LABELS]),
        make_record("features", "subspace", metrics={"feature_error": [0.0]}, verdict="leaked", details=premises, evidence=[LABELS]),
    ]
    page = render(records)
    top = page[: page.index("In plain words")]
    assert top.count("takes for granted: one gradient; no defense.") == 1
    assert "What is proved takes for granted the same as for features." in top
