"""Models that take several tensors of numbers, by name or in order: one row of numbers a sample for the attacks."""

import pytest
import torch
from torch import nn

import dosimeter as dm


class Branches(nn.Module):
    """Two tables that meet."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(5, 16), nn.Linear(6, 16), nn.Linear(16, 6)

    def forward(self, left, right):
        return self.head(torch.tanh(self.first(left) + self.second(right.flatten(1))))


def network():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Branches()


LEFT, RIGHT = torch.rand(2, 5, generator=torch.Generator().manual_seed(1)), torch.rand(2, 2, 3, generator=torch.Generator().manual_seed(2))
LABELS = torch.tensor([1, 4])


@pytest.mark.parametrize("inputs", [{"right": RIGHT, "left": LEFT}, (LEFT, RIGHT)], ids=["by name", "in order"])
def test_several_tensors_are_audited_as_one_row(inputs):
    model, batch = network(), dm.Batch(inputs, LABELS)
    exposure = dm.observe(model, batch)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(model(LEFT, RIGHT), LABELS), list(model.parameters()))
    for name, gradient in zip(dict(model.named_parameters()), wanted):
        assert torch.allclose(exposure.update[name], gradient, atol=1e-7)
    assert exposure.public.input_shape == (11,)
    assert dm.recover_labels(exposure, "subspace").labels.tolist() == [1, 4]
    features = dm.recover_features(exposure, "subspace")
    assert float(dm.score(features, batch, exposure=exposure)["feature_error"].max()) < 1e-4
    found = dm.reconstruct(exposure, "dlg", labels=LABELS, steps=200)
    assert float(dm.score(found, batch, metrics=["mse"])["mse"].max()) < 1e-4
    assert not hasattr(model, "_dosimeter_parts")


def test_the_exposure_holds_nothing_of_the_tensors():
    left, right = LEFT.clone(), RIGHT.clone()
    exposure = dm.observe(network(), dm.Batch((left, right), LABELS))
    before = dm.reconstruct(exposure, "dlg", labels=LABELS, steps=3).inputs
    left.zero_()
    right.zero_()
    assert torch.equal(before, dm.reconstruct(exposure, "dlg", labels=LABELS, steps=3).inputs)


def test_what_is_no_tensor_gets_a_sentence():
    with pytest.raises(TypeError, match="batch: expected tensors, got str"):
        dm.observe(network(), dm.Batch((LEFT, "right"), LABELS))


def test_an_audit_takes_several_tensors():
    audit = dm.audit(network(), dm.Batch((LEFT, RIGHT), LABELS), labels=["subspace"], features=["subspace"], maps=[], attacks=[])
    assert {record.surface: record.verdict for record in audit.records} == {"labels": "leaked", "features": "leaked"}


class Categories(nn.Module):
    """Columns of categories, each with an embedding of its own or all with one, beside columns of numbers."""

    def __init__(self, each):
        super().__init__()
        torch.manual_seed(0)
        self.tables = nn.ModuleList(nn.Embedding(20, 8) for _ in range(3 if each else 1))
        self.numbers, self.head = nn.Linear(4, 8), nn.Linear(8, 10)

    def forward(self, numbers, ids):
        if len(self.tables) == 1:
            looked_up = self.tables[0](ids).sum(1)
        else:
            looked_up = sum(table(column) for table, column in zip(self.tables, ids.T))
        return self.head(torch.relu(looked_up + self.numbers(numbers)))


@pytest.mark.parametrize("each", [False, True])
def test_ids_beside_numbers_are_read_as_a_classifiers(each):
    ids = torch.randint(20, (2, 3), generator=torch.Generator().manual_seed(3))
    batch = dm.Batch((torch.rand(2, 4, generator=torch.Generator().manual_seed(4)), ids), LABELS)
    exposure = dm.observe(Categories(each).eval(), batch)
    found = dm.recover_labels(exposure, "subspace")
    assert found.certified
    assert found.labels.tolist() == [1, 4]
    if not each:
        assert dm.recover_tokens(exposure).certified == set(ids.flatten().tolist())
    report = dm.audit(Categories(each).eval(), batch, labels=["subspace"], features=["subspace"], attacks=[], tokens=["embedding_rows"])
    assert {record.surface for record in report.records if record.verdict == "leaked"} >= {"labels", "features"}


def test_one_id_a_sample_beside_numbers_is_refused_in_a_sentence():
    batch = dm.Batch({"numbers": torch.rand(2, 4), "kind": torch.tensor([1, 2])}, LABELS)
    with pytest.raises(ValueError, match=r"got integers in kind beside numbers; pass ids \(B,\) of a category as \(B, 1\)"):
        dm.observe(network(), batch)
