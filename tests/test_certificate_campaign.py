"""The campaign for false proofs counts what it is meant to count."""

import json
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import dosimeter as dm

BENCHMARKS = str(Path(__file__).resolve().parents[1] / "benchmarks")


@pytest.fixture
def campaign(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    import certificates

    yield certificates
    for name in ("certificates", "head_cases", *(name for name in sys.modules if name.startswith("certificate_kinds"))):
        sys.modules.pop(name, None)


def rows_of(campaign, *certified_true_recovered, premises=()):
    from certificate_kinds.kind import Row

    return [Row(certified=a, true=b, recovered=c, premises=premises) for a, b, c in certified_true_recovered]


def kind_of(campaign, rows, breaks=""):
    from certificate_kinds.kind import Kind

    return Kind(name="labels/some: kind", draw=lambda seed: rows, breaks=breaks)


def test_a_false_certificate_is_counted_and_a_true_recovery_without_one_lowers_the_share(campaign):
    rows = rows_of(campaign, (True, True, True), (True, False, False), (False, False, True))
    result = campaign.measure(kind_of(campaign, rows), 3, rows)
    assert (result["certified"], result["false"], result["recovered"]) == (2, 1, 2)
    assert campaign.share(campaign.summarise([result], {})["kinds"]["labels/some: kind"]) == 0.5


def test_only_the_broken_premise_excuses_a_false_certificate(campaign):
    for premise, false in (("the batch size is 8, as declared", 0), ("the update is one gradient", 1)):
        rows = rows_of(campaign, (True, False, False), premises=(premise,))
        result = campaign.measure(kind_of(campaign, rows, breaks="batch size"), 3, rows)
        assert result["false"] == false
        assert result["excused"] == 1 - false
    rows = rows_of(campaign, (True, False, False), premises=("the batch size is 8, as declared",))
    assert campaign.measure(kind_of(campaign, rows), 3, rows)["false"] == 1


def test_a_crash_is_a_row_and_not_the_end(campaign, monkeypatch):
    def crash(seed):
        raise ZeroDivisionError("by design")

    from certificate_kinds.kind import Kind

    monkeypatch.setattr(campaign, "_kinds_here", lambda data: {"some: kind": Kind(name="some: kind", draw=crash)})
    result = campaign.run_draw("some: kind", 0, None, 10)
    assert result["errors"] == 1
    assert "by design" in result["note"]


def test_merged_summaries_add_up(campaign):
    one = campaign.summarise([{"kind": "a", "seed": 0, "draws": 1, "certified": 2}], {"b": "no data"})
    other = campaign.summarise([{"kind": "b", "seed": 0, "draws": 1, "certified": 1}, {"kind": "a", "seed": 1, "draws": 1}], {})
    merged = campaign.merge([one, other])
    assert merged["kinds"]["a"]["draws"] == 2
    assert merged["kinds"]["a"]["certified"] == 2
    assert merged["skipped"] == {}


def test_a_merged_record_names_the_command_and_the_seeds_of_each_part(campaign, tmp_path, monkeypatch):
    parts = []
    for seed in (50, 70):
        monkeypatch.setattr("sys.argv", ["certificates.py", "--seed", str(seed), "--out", "part.json"])
        part = campaign.summarise([{"kind": "a", "seed": seed + turn, "draws": 1} for turn in range(2)], {})
        parts.append(part | {"runs": [campaign.run_of(part, seed)]})
    campaign.write_record(tmp_path / "record.json", campaign.merge(parts))
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["command"] == ["python benchmarks/certificates.py --seed 50", "python benchmarks/certificates.py --seed 70"]
    assert record["seeds"].startswith("50 to 51, 70 to 71")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_no_false_certificate_in_a_few_draws_of_every_kind(campaign):
    kinds = {name: kind for name, kind in campaign.all_kinds(None).items() if not kind.skipped}
    summary = campaign.summarise((campaign.run_draw(name, seed, None, 120) for name in kinds for seed in (7001,)), {})
    assert summary["notes"] == []
    assert all(counts["false"] == 0 for counts in summary["kinds"].values())


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("claims/imprint: no size declared", 5005),  # two samples share the bins of two functionals
        ("claims/imprint: behind clipping", 5005),
        ("claims/imprint: alike samples, tiny head", 5011),  # the labels of others cancel
        ("claims/linear_recursion: labels that cancel", 5010),
        ("claims/trap_weights: labels that cancel", 5026),
        ("claims/linear_recursion: 8-bit pictures, labels that cancel", 1700004),  # sums of pictures lie on levels
        ("claims/trap_weights: 8-bit pictures, labels that cancel", 1700010),
        ("tokens/dager: local steps", 4004),  # a place in the middle of the texts showed no token, and the search crashed
    ],
)
def test_draws_that_once_gave_a_false_claim_or_an_error_give_none(campaign, name, seed):
    result = campaign.run_draw(name, seed, None, 100)
    assert (result["false"], result["excused"], result.get("note")) == (0, 0, None)


def two_copies(width=30):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 3))
    inputs = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(1)) * 0.6 + 0.2
    inputs[1] = inputs[0]
    return model, inputs


def test_a_rival_of_two_copies_has_their_update_and_none_of_them(campaign):
    from certificate_kinds.rivals import split_copies

    model, inputs = two_copies()
    batch = dm.Batch(inputs, torch.tensor([2, 2, 1]))
    rival = split_copies(model, batch, 0, 1e-3)
    assert rival is not None
    apart = (rival.inputs[:2].float() - inputs[0]).flatten(1).norm(dim=1) / inputs[0].norm()
    assert float(apart.min()) > 1e-3
    assert float(rival.inputs.min()) >= 0
    assert float(rival.inputs.max()) <= 1
    mine, other = (dm.observe(model, dm.Batch(one.inputs.float(), one.targets)).update for one in (batch, rival))
    for name, gradient in mine.items():
        torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))


def test_a_sample_without_a_copy_of_its_label_has_no_such_rival(campaign):
    from certificate_kinds.rivals import split_copies

    model, inputs = two_copies()
    assert split_copies(model, dm.Batch(inputs, torch.tensor([2, 2, 1])), 2, 1e-3) is None
    assert split_copies(model, dm.Batch(inputs, torch.tensor([2, 0, 1])), 0, 1e-3) is None
    assert split_copies(model, dm.Batch(inputs.round(), torch.tensor([2, 2, 1])), 0, 1e-3) is None  # black and white leave no room


def test_two_classes_let_copies_under_both_labels_part_and_single_precision_hides_small_steps(campaign):
    from certificate_kinds.rivals import split_copies

    inputs = two_copies()[1]
    for activation, targets in ((nn.ReLU(), [1, 0, 1]), (nn.Tanh(), [1, 1, 0])):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 30), activation, nn.Linear(30, 2))
        rival = split_copies(model, dm.Batch(inputs, torch.tensor(targets)), 0, 1e-3)
        assert rival is not None
        assert float((rival.inputs[0].float() - inputs[0]).norm() / inputs[0].norm()) > 1e-3
        mine, other = (dm.observe(model, dm.Batch(one, torch.tensor(targets))).update for one in (inputs, rival.inputs.float()))
        for name, gradient in mine.items():
            assert float((other[name] - gradient).norm()) < 3e-6 * float(gradient.norm())


@pytest.mark.usefixtures("campaign")
def test_an_edge_between_samples_that_single_zeros_hold_is_no_sample():
    """Two edges of this batch's cone mix three samples. They have a hundred zeros in common, and two more by being edges."""
    from certificate_kinds.maps import certified_maps, small

    rows = certified_maps(partial(small, change="black"), 800011)
    assert [row.certified for row in rows] == [True] * 7
    assert all(row.true for row in rows)


def test_without_a_declared_size_a_batch_of_pairs_has_the_same_update(campaign):
    """So no proof can tell a sample from two around it: each sample twice has the same mean gradient, and the two copies may part."""
    from certificate_kinds.rivals import split_copies

    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 3)).eval()
    own = dm.Batch(0.3 + 0.4 * torch.rand(3, 1, 8, 8), torch.tensor([0, 1, 2]))
    twice = dm.Batch(torch.cat([own.inputs] * 2), torch.cat([own.targets] * 2))
    rival = split_copies(model, twice, 0, 1e-3)
    assert rival is not None
    assert torch.cdist(rival.inputs.flatten(1), own.inputs[:1].double().flatten(1)).min() > 1e-3 * own.inputs[0].norm()
    exact = model.double()
    update = dm.observe(exact, dm.Batch(own.inputs.double(), own.targets)).update
    for name, change in dm.observe(exact, rival).update.items():
        assert torch.allclose(change, update[name], rtol=0, atol=1e-9)
