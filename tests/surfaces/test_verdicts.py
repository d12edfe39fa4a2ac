"""The verdicts as the records hold them."""

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dosimeter.surfaces.surface import surface_names
from dosimeter.surfaces.verdicts import UTILITY, Verdict, refusal_of, verdict_of, verdict_of_failure
from dosimeter.types import Impossible, LabelEstimate, Outcome, Record, Refused


def test_the_words_in_the_records_come_gravest_first():
    words = ["leaked", "proved", "unverified", "not shown at this budget", "not attempted", "impossible here", "not measured"]
    assert [str(verdict) for verdict in Verdict] == words


def test_a_word_that_is_no_verdict_is_refused_with_its_record():
    with pytest.raises(ValueError, match="verdict: expected one of leaked"):
        verdict_of(cast(Record, SimpleNamespace(key="k1", verdict="leaky")))


def test_impossible_needs_a_theorem():
    with pytest.raises(TypeError, match="theorem"):
        Impossible("the update is zero")
    assert verdict_of_failure(Outcome.IMPOSSIBLE, "zero is zero") is Verdict.IMPOSSIBLE
    assert verdict_of_failure(Outcome.IMPOSSIBLE, "") is Verdict.NOT_ATTEMPTED
    assert verdict_of_failure(Outcome.NOT_ATTEMPTED, "zero is zero") is Verdict.NOT_ATTEMPTED
    assert verdict_of_failure(Outcome.CRASHED, "") is Verdict.NOT_MEASURED


def test_an_estimate_without_a_theorem_refuses_and_proves_nothing():
    found = LabelEstimate(counts=torch.zeros(2), labels=torch.zeros(0), outcome=Outcome.IMPOSSIBLE, message="no head")
    assert type(refusal_of(found)) is Refused
    proved = refusal_of(replace(found, theorem="zero is zero"))
    assert isinstance(proved, Impossible)
    assert (str(proved), proved.theorem) == ("no head: zero is zero", "zero is zero")
    assert type(refusal_of(replace(found, outcome=Outcome.NOT_ATTEMPTED))) is Refused
    assert refusal_of(replace(found, outcome=Outcome.SINGULAR)) is None


def test_a_defenses_cost_is_no_surface_and_other_words_are_no_verdict():
    assert UTILITY not in surface_names()
    with pytest.raises(ValueError, match="harmless"):
        Verdict("harmless")
