"""Membership: the server asks of the client's samples among others, proves some, and luck, classes and looks make no leak."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.bounds.membership_tradeoff import MembershipTradeoff
from dosimeter.engines.membership.estimate import MembershipEstimate, true_positive_bound
from dosimeter.report.page import render
from dosimeter.runs.audited_client import client_from
from dosimeter.runs.experiment import run
from dosimeter.runs.gate import parse_condition
from dosimeter.runs.measurement import Measurement
from dosimeter.runs.membership import with_candidates
from dosimeter.surfaces.membership import chance_within_classes, members_of
from dosimeter.surfaces.surface import surface_named
from dosimeter.types import Ceiling

OTHERS = {"labels": [], "features": [], "maps": [], "attacks": []}


@pytest.fixture(scope="module")
def setting():
    torch.manual_seed(5)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.ReLU(), nn.Linear(24, 10)).eval()
    images, labels = torch.rand(124, 1, 6, 6), torch.arange(124) % 10
    return model, dm.Batch(images[:4], labels[:4]), dm.Batch(images[4:], labels[4:])


def _client(setting, **options):
    model, batch, auxiliary = setting
    return client_from(model, batch, auxiliary=auxiliary, **options)


def test_an_audit_proves_who_is_in_the_batch_and_who_is_not(setting):
    model, batch, auxiliary = setting
    report = dm.audit(model, batch, auxiliary=auxiliary, membership=["spans"], **OTHERS)
    (record,) = report.records
    assert (record.surface, record.verdict) == ("membership", "leaked")
    assert record.details["proved"] == 4
    assert record.details["excluded"] == record.details["others"] == 116  # four are the foreign batch
    assert record.details["false_certificates"] == 0
    assert record.metrics["members_at_1"] == [1.0]
    assert record.nulls["guessing"]["members_at_1"] == [0.01]
    assert "foreign" not in record.nulls  # no null changes what is proved
    assert record.details["proved_samples"] == [True]
    assert "near copy" in " ".join(record.details["premises"])
    assert parse_condition("membership.verdict == leaked").failure([record])
    assert parse_condition("membership.members_at_1.median > 0.5").failure([record])
    page = render(report.records)
    for words in ("Membership leaked", "Members found at each share of false alarms", "4 samples of the batch among 116 others"):
        assert words in page


def test_the_order_of_candidates_depends_on_the_private_batch_and_holds_no_sample_twice(setting):
    client = _client(setting)
    exposure = dm.observe(client.model, client.batch)
    first, again = (with_candidates(client, exposure, 0).candidates for _ in range(2))
    assert torch.equal(first.inputs, again.inputs)
    changed = replace(client, batch=dm.Batch(client.batch.inputs + 1e-6, client.batch.targets))
    other = with_candidates(changed, exposure, 0).candidates
    assert not torch.equal(members_of(first, client.batch), members_of(other, changed.batch))
    doubled = dm.Batch(client.batch.inputs[[0, 0, 1, 2]], client.batch.targets[[0, 0, 1, 2]])
    both = replace(client, batch=doubled, auxiliary=dm.Batch(torch.cat((client.auxiliary.inputs, doubled.inputs)), torch.zeros(124).long()))
    assert int(members_of(with_candidates(both, exposure, 0).candidates, doubled).sum()) == 3
    assert len(with_candidates(both, exposure, 0).candidates.inputs) == 3 + 116


def test_without_other_samples_the_record_says_what_is_needed(setting):
    model, batch, _ = setting
    (record,) = dm.audit(model, batch, membership=["spans"], **OTHERS).records
    assert record.verdict == "not attempted"
    assert "auxiliary=dm.Batch" in record.reason


def test_it_runs_by_default_but_not_where_other_surfaces_are_left_out(setting):
    model, batch, auxiliary = setting
    few = {"labels": ["idlg"], "features": ["quotient"], "maps": ["shifts"], "attacks": [dm.attack("dlg", steps=1)]}
    assert {r.method for r in dm.audit(model, batch, auxiliary=auxiliary, **few).records} >= {"spans", "likelihood", "alignment"}
    named = OTHERS | {"labels": ["idlg"]}
    assert [r.surface for r in dm.audit(model, batch, auxiliary=auxiliary, **named).records] == ["labels"]


@pytest.mark.parametrize("method", ["spans", "alignment"])
def test_a_batch_that_was_not_trained_on_is_no_leak(setting, method):
    """The update is of other samples with the same labels, so that the class alone can tell nothing."""
    client, leaks = _client(setting), 0
    for seed in range(12):
        other = torch.rand(4, 1, 6, 6, generator=torch.Generator().manual_seed(seed))
        exposure = dm.observe(client.model, dm.Batch(other, client.batch.targets))
        record = run(client, Measurement(method=dm.registry.MEMBERSHIP.build(method), labels="optimised", seed=seed), exposure=exposure)
        leaks += record.verdict == "leaked"
        assert "proved" not in record.details or record.details["proved"] == 0
    assert leaks <= 1


def test_the_ceiling_is_that_of_differential_privacy(setting):
    model, batch, auxiliary = setting
    private = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=4.0),)
    (record,) = dm.audit(model, batch, auxiliary=auxiliary, defenses=private, membership=["likelihood"], **OTHERS).records
    assert record.details["others"] == 116  # a member above all but one of them would be so by chance in 2 of 117 cases
    most = true_positive_bound(2 / 117, noise_multiplier=4.0).value
    assert record.details["ceiling"]["members_at_1"] == pytest.approx([most])
    assert [point["at_most"] for point in record.details["roc"]][1] == pytest.approx(most)
    assert parse_condition("membership.ceiling.members_at_1 > 0.01").failure([record])
    assert parse_condition(f"membership.ceiling.members_at_1 > {most + 0.01}").failure([record]) is None
    assert "the most that differential privacy allows" in render([record])


def test_scores_that_mean_nothing_stay_below_the_ceiling_among_few_others():
    """Behind endless noise a test guesses. What it finds is on average what the ceiling says, however few others there are."""
    rng = torch.Generator().manual_seed(3)
    for others in (20, 60, 100, 250):
        inside = torch.arange(others + 8) < 8
        metric = dm.registry.METRICS.build("members_at_1")
        found = [float(metric(torch.randn(others + 8, generator=rng), inside)) for _ in range(3000)]
        bound = MembershipTradeoff()
        ceiling = Ceiling(
            bound=bound.name,
            surface="membership",
            metric="members_at_1",
            values=torch.tensor([0.01]),
            proved=True,
            assumptions=(),
            details={"noise_multiplier": 1e9},
        )
        most = float(bound.as_measured(ceiling, {"others": others}).values[0])
        assert sum(found) / 3000 == pytest.approx(most, abs=0.003)


def test_a_claim_that_the_truth_refutes_takes_the_verdict_away(setting):
    client = _client(setting)
    exposure = with_candidates(client, dm.observe(client.model, client.batch), 0)
    wrong = ~members_of(exposure.candidates, client.batch)
    found = MembershipEstimate(scores=wrong.double(), members=wrong, excluded=~wrong, test="spans", premises=("none",))
    scores = dm.score(found, client.batch, exposure=exposure)
    verdict, reason = surface_named("membership").judge(found, scores, 1)
    assert verdict == "not shown at this budget"
    assert "120 claims are refuted" in reason


def test_the_foreign_null_is_made_where_it_can_change_the_verdict(setting):
    """Little noise: the members stand out, and the same candidates are tested on another client's update too."""
    model, batch, auxiliary = setting
    private = (dm.defense("gaussian_noise", std=1e-3),)
    (record,) = dm.audit(model, batch, auxiliary=auxiliary, defenses=private, membership=["likelihood"], **OTHERS).records
    assert record.verdict == "leaked"
    assert record.metrics["membership_auc"][0] > record.nulls["foreign"]["membership_auc"][0]


def test_luck_is_a_permutation_within_classes():
    inside = torch.tensor([True, False, False, True, False, False])
    classes = torch.tensor([0, 0, 0, 1, 1, 1])
    best = torch.tensor([3.0, 2.0, 1.0, 13.0, 12.0, 11.0])
    assert chance_within_classes(best, inside, classes) == pytest.approx(1 / 9, abs=0.02)
    only_the_class = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    assert chance_within_classes(only_the_class, inside, classes) == 1.0


def test_a_received_update_without_truth_has_no_members_to_score(setting):
    model, batch, auxiliary = setting
    exposure = dm.receive(model, dm.observe(model, batch).update, kind="gradient", input_shape=(1, 6, 6), batch_size=4, auxiliary=auxiliary)
    (record,) = dm.audit(exposure=exposure, membership=["spans"], **OTHERS).records
    assert record.verdict == "not attempted"
    assert "dm.test_membership" in record.reason
    found = dm.test_membership(
        exposure, dm.Batch(torch.cat((batch.inputs, auxiliary.inputs)), torch.cat((batch.targets, auxiliary.targets)))
    )
    assert found.members.tolist() == [True] * 4 + [False] * 120
