"""Metrics of tokens: sets by hand, ROUGE beside the library of its authors where it is installed."""

import pytest
import torch

from dosimeter.metrics.rouge1 import Rouge1
from dosimeter.metrics.rouge2 import Rouge2
from dosimeter.metrics.rougel import RougeL
from dosimeter.metrics.sequence_match import SequenceMatch
from dosimeter.metrics.texts import ngram_overlap, subsequence_overlap
from dosimeter.metrics.token_f1 import TokenF1
from dosimeter.metrics.token_precision import TokenPrecision
from dosimeter.metrics.token_recall import TokenRecall


def members(*tokens):
    return torch.zeros(10, dtype=torch.bool).index_fill_(0, torch.tensor(tokens, dtype=torch.int64), True)


def test_sets_by_hand():
    assert TokenF1()(members(1, 2, 3), members(2, 3, 4, 5)).tolist() == [pytest.approx(4 / 7)]
    assert TokenPrecision()(members(1, 2, 3), members(2, 3, 4, 5)).tolist() == [pytest.approx(2 / 3)]
    assert TokenRecall()(members(1, 2, 3), members(2, 3, 4, 5)).tolist() == [0.5]
    assert TokenPrecision()(members(), members(1)).tolist() == [1.0]
    assert TokenF1()(members(), members(1)).tolist() == [0.0]


def test_texts_by_hand():
    mine, true = torch.tensor([[1, 2, 3, -1], [4, 4, 5, 6]]), torch.tensor([[1, 2, 3, -1], [4, 5, 6, 7]])
    assert SequenceMatch()(mine, true).tolist() == [1.0, 0.0]
    assert Rouge1()(mine, true).tolist() == [1.0, 0.75]
    assert Rouge2()(mine, true).tolist() == [1.0, pytest.approx(2 / 3)]
    assert RougeL()(mine, true).tolist() == [1.0, 0.75]


def test_shapes_that_cannot_be_paired_are_refused():
    with pytest.raises(ValueError, match="rouge1: expected as many recovered rows"):
        Rouge1()(torch.zeros(2, 3), torch.zeros(1, 3))


def test_rouge_is_that_of_its_library():
    scorer = pytest.importorskip("rouge_score.rouge_scorer", reason="rouge-score is not installed")
    reference = scorer.RougeScorer(["rouge1", "rouge2", "rougeL"], use_stemmer=False)
    stream = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(2, 12, (2,), generator=stream).tolist()
        mine, true = (torch.randint(6, (length,), generator=stream).tolist() for length in lengths)
        wanted = reference.score(" ".join(map(str, true)), " ".join(map(str, mine)))
        assert ngram_overlap(mine, true, 1) == pytest.approx(wanted["rouge1"].fmeasure)
        assert ngram_overlap(mine, true, 2) == pytest.approx(wanted["rouge2"].fmeasure)
        assert subsequence_overlap(mine, true) == pytest.approx(wanted["rougeL"].fmeasure)
