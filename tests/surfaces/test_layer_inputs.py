"""One score and one verdict for what a layer receives: certificates, nulls, luck, and when the truth can refute."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import input_of
from dosimeter.surfaces.layer_inputs import beats_nulls, can_refute, drops_units, judge_errors, reader_of
from dosimeter.surfaces.scores import Scores
from dosimeter.surfaces.verdicts import Verdict

NULLS = {"mean": 0.4, "foreign": 1.0}


@pytest.fixture(params=["feature", "map"])
def judged(request):
    """The verdict on errors beside nulls that have one error for all samples."""

    def judge(errors, nulls=NULLS, certified=0, attempts=1, **details):
        values = torch.tensor([float("nan") if error is None else error for error in errors])
        columns = {name: {f"{request.param}_error": torch.full_like(values, error)} for name, error in nulls.items()}
        per_metric = {f"{request.param}_error": values} if errors else {}
        scores = Scores(surface=f"{request.param}s", per_metric=per_metric, nulls=columns, assignment=None, details=details)
        return judge_errors(request.param, "things", scores, certified=certified, attempts=attempts)

    return judge


def test_a_leak_is_shown_by_certificate_or_by_half_of_the_best_null(judged):
    assert judged([0.19, 0.19], chance=0.01)[0] is Verdict.LEAKED
    assert judged([0.21, 0.21], chance=0.01)[0] is Verdict.NOT_SHOWN
    assert judged([0.9, None], certified=1, chance=1.0) == (
        Verdict.LEAKED,
        "1 of 2 things certified from the gradient alone; 1 of 2 samples came back, so that the median relative error is unknown",
    )


def test_certificates_that_the_truth_refutes_take_the_verdict_away(judged):
    verdict, reason = judged([0.001, 0.9], certified=2, false_certificates=1, chance=0.0)
    assert verdict is Verdict.NOT_SHOWN
    assert reason.startswith("1 of 2 certificates are refuted")


def test_without_certificates_luck_must_be_refuted_for_all_methods_tried(judged):
    assert judged([0.1, 0.1], chance=0.01, attempts=5)[0] is Verdict.LEAKED
    verdict, reason = judged([0.1, 0.1], chance=0.011, attempts=5)
    assert verdict is Verdict.NOT_SHOWN
    assert "probability 0.055, counting 5 methods" in reason
    assert judged([0.1, 0.1])[0] is Verdict.NOT_SHOWN  # nobody computed a chance


def test_without_a_foreign_null_only_a_certificate_shows_a_leak(judged):
    verdict, reason = judged([0.1, 0.1], {"mean": 0.4}, chance=0.0, refused_nulls={"foreign": "the gradient is zero"})
    assert verdict is Verdict.NOT_SHOWN
    assert reason.endswith("without a null of the same kind: the gradient is zero")
    assert judged([0.1, 0.1], {"mean": 0.4}, certified=1, chance=1.0)[0] is Verdict.LEAKED


def test_errors_that_cannot_be_measured_leave_the_certificates(judged):
    assert judged([], {}, certified=2)[0] is Verdict.LEAKED
    verdict, reason = judged([], {})
    assert verdict is Verdict.NOT_SHOWN
    assert "cannot be computed again" in reason


@pytest.mark.parametrize(
    ("error", "rivals", "beats"),
    [(0.19, [0.4, 1.0], True), (0.2, [0.4, 1.0], False), (0.49, [], True), (0.5, [9.0], False), (0.1, [None], True), (None, [1.0], False)],
)
def test_a_sample_beats_its_nulls_below_half_of_each_and_of_the_zero_vector(error, rivals, beats):
    assert beats_nulls(error, rivals) is beats


def test_a_reader_tells_what_the_layer_receives_in_pieces_too(classifier, digits):
    exposure = dm.observe(classifier, dm.Batch(digits.inputs[:3], digits.targets[:3]))
    read = reader_of(exposure, "3")
    expected = classifier[:3](digits.inputs[:90]).detach()
    assert torch.allclose(read(digits.inputs[:90]), expected, atol=1e-6)
    assert torch.allclose(read.in_pieces(digits.inputs[:90]).float(), expected, atol=1e-6)
    assert torch.equal(read(digits.inputs[:3]), input_of(classifier, "3", digits.inputs[:3]))
    doubled = reader_of(exposure, "3", lambda received, layer: 2 * received)
    assert torch.allclose(doubled(digits.inputs[:3]), 2 * expected[:3], atol=1e-6)


def test_dropout_counts_in_train_mode_and_above_zero():
    assert drops_units(nn.Sequential(nn.Dropout(0.5)).train())
    assert not drops_units(nn.Sequential(nn.Dropout(0.5)).eval())
    assert not drops_units(nn.Sequential(nn.Dropout2d(0.0)).train())


def test_the_truth_refutes_nothing_behind_a_defense_that_replaces_the_batch(classifier, digits):
    batch = dm.Batch(digits.inputs[:3], digits.targets[:3])
    assert can_refute(dm.observe(classifier, batch, defenses=[dm.defense("pruning", ratio=0.5)]))
    assert not can_refute(dm.observe(classifier, batch, defenses=[dm.defense("mixup")]))
