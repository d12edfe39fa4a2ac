"""The surface of tokens: scores of sets and texts, nulls, verdicts, and an audit of a language model from end to end."""

from dataclasses import replace

import pytest
import torch

import dosimeter as dm
from dosimeter.models.transformer import Transformer
from dosimeter.report.page import render
from dosimeter.surfaces.scores import Comparison
from dosimeter.surfaces.surface import surface_named
from dosimeter.surfaces.tokens import assign_texts, false_certificates, private_texts
from dosimeter.types import TokenEstimate

TRUTH = dm.Batch(torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([0, 1]))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return Transformer("gpt2", vocabulary=200, width=32, layers=2, heads=4, positions=8).eval()


def estimate(*tokens, **options):
    return TokenEstimate(tokens=frozenset(tokens), details={"vocabulary": 200}, **options)


def test_sets_are_scored_by_hand_counted_shares():
    scores = dm.score(estimate(1, 2, 3, 4, 5, 99), TRUTH)
    assert scores["token_recall"].tolist() == [5 / 8]
    assert scores["token_precision"].tolist() == [5 / 6]
    assert scores["token_f1"].tolist() == [pytest.approx(10 / 14)]
    assert "rouge1" not in scores


def test_texts_are_matched_with_the_closest_ones():
    found = estimate(*range(1, 9), sequences=((5, 6, 7, 8), (1, 2, 4, 3)))
    scores = dm.score(found, TRUTH)
    assert scores.assignment.tolist() == [1, 0]
    assert scores["sequence_match"].tolist() == [0.0, 1.0]
    assert scores["rouge1"].tolist() == [1.0, 1.0]
    assert scores["rouge2"].tolist() == [pytest.approx(1 / 3), 1.0]
    assert scores["rougel"].tolist() == [0.75, 1.0]
    assert assign_texts([], [(1,)]).tolist() == [-1]


def test_masked_positions_are_no_part_of_a_text():
    inputs = {"input_ids": TRUTH.inputs, "attention_mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])}
    assert private_texts(dm.Batch(inputs, TRUTH.targets)) == [(1, 2), (5, 6, 7, 8)]


def test_knowing_common_words_is_no_leak():
    """A guess that lists the common tokens of the auxiliary text agrees as well with any text of this kind."""
    auxiliary = dm.Batch(torch.tensor([[1, 2, 3, 4, 5, 6, 7, 8]] * 8), torch.zeros(8, dtype=torch.int64))
    common = estimate(*range(1, 9))
    surface = surface_named("tokens")
    assert surface.judge(common, dm.score(common, TRUTH, auxiliary=auxiliary, foreign=common), 1)[0] == "not shown at this budget"
    blind = dm.score(common, TRUTH, foreign=estimate(50, 51))
    assert surface.judge(common, blind, 1)[0] == "leaked"
    assert blind.details["chance"] <= 0.01
    verdict, reason = surface.judge(common, dm.score(common, TRUTH), 1)
    assert verdict == "not shown at this budget"
    assert "no leak is claimed without a null of the same kind" in reason


def test_a_certificate_that_the_truth_refutes_takes_the_verdict_away():
    wrong = estimate(1, 2, 99, certified=frozenset({1, 99}), sequences=((1, 2, 4),), certified_sequences=(True,))
    assert false_certificates(wrong, [(1, 2, 3, 4), (5, 6, 7, 8)]) == 2
    verdict, reason = surface_named("tokens").judge(wrong, dm.score(wrong, TRUTH), 1)
    assert verdict == "not shown at this budget"
    assert "2 certificates are refuted" in reason
    right = replace(wrong, tokens=frozenset({1}), certified=frozenset({1}), sequences=(), certified_sequences=())
    assert surface_named("tokens").judge(right, dm.score(right, TRUTH), 1)[0] == "leaked"


def test_an_audit_of_a_language_model_runs_the_token_recoveries_alone(model):
    ids = torch.randint(200, (2, 8), generator=torch.Generator().manual_seed(3))
    records = dm.audit(model, dm.Batch(ids, ids.roll(-1, 1)), tokens=["embedding_rows"]).records
    tried = [record for record in records if record.surface != "membership"]
    assert [(record.surface, record.method, record.verdict) for record in tried] == [("tokens", "embedding_rows", "leaked")]
    assert {record.verdict for record in records if record not in tried} == {"not attempted"}  # without auxiliary texts
    assert records[0].metrics["token_f1"] == [1.0]
    assert records[0].nulls["foreign"]["token_f1"][0] < 0.5
    assert records[0].nulls["unigram"]["token_f1"][0] < 0.5
    page = render([replace(record, seconds=1.0) for record in records])
    assert "certified: no other token leaves a trace" in page


def test_the_evidence_pairs_private_and_recovered_texts():
    surface = surface_named("tokens")
    found = estimate(*range(1, 9), sequences=((5, 6, 7, 8), (1, 2, 4, 3)))
    comparison = Comparison(truth=TRUTH)
    shown = surface.evidence(found, comparison, surface.score(found, comparison))
    assert [(one.private, one.recovered, one.score) for one in shown] == [("1 2 3 4", "1 2 4 3", 1.0), ("5 6 7 8", "5 6 7 8", 1.0)]
    (alone,) = surface.evidence(estimate(7, 3))
    assert (alone.kind, alone.recovered, alone.private) == ("text", "3 7", None)


def test_what_reads_pixels_refuses_texts(model):
    ids = torch.randint(200, (2, 8), generator=torch.Generator().manual_seed(3))
    exposure = dm.observe(model, dm.Batch(ids, ids))
    with pytest.raises(dm.Refused, match=r"dlg looks for inputs that are numbers, and this model takes token ids; dm.recover_tokens"):
        dm.reconstruct(exposure, "dlg")
    with pytest.raises(dm.Refused, match="ilrg reads one output a sample, and this model has one at each position of a text"):
        dm.recover_labels(exposure, "ilrg")
    with pytest.raises(dm.Refused, match="shifts looks for maps that are numbers"):
        dm.recover_maps(exposure)
    with pytest.raises(dm.Refused, match="blur changes pixels, and this batch holds token ids"):
        dm.observe(model, dm.Batch(ids, ids), defenses=(dm.defense("blur", sigma=1.0),))


def test_an_audit_of_a_tokenizers_dictionary_measures_every_surface():
    """What papers print about the inside of a label recovery is computed from a dictionary too."""
    torch.manual_seed(2413)
    model = Transformer("bert", vocabulary=60, width=32, layers=1, heads=4, positions=8, classes=3).eval()
    ids = torch.randint(60, (2, 5))
    batch = dm.Batch({"input_ids": ids, "attention_mask": torch.ones_like(ids)}, torch.tensor([0, 2]))
    records = dm.audit(model, batch, labels=["ilrg", "subspace"], features=["subspace"], tokens=["embedding_rows"]).records
    assert [record.outcome for record in records if record.verdict == "not measured"] == []
    assert "probability_cosine" in next(record for record in records if record.method == "ilrg").details
    with pytest.raises(TypeError, match=r"batch.inputs: expected one tensor, .* got input_ids, attention_mask"):
        dm.inspect(model, batch=batch)
