"""Each membership test: its law, its reference and its refusals."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def _candidates(count=20, classes=10, seed=0):
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(count, 3, 8, 8, generator=rng), torch.randint(0, classes, (count,), generator=rng))


def _first(batch, count):
    return dm.Batch(batch.inputs[:count], batch.targets[:count])


def _net(*layers, outputs=10):
    torch.manual_seed(1)
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(outputs))


def _built(model):
    model(torch.rand(1, 3, 8, 8))
    return model


def test_a_convolution_decides_where_the_head_has_no_room():
    model = _built(_net(nn.Conv2d(3, 40, 5, stride=4), nn.Tanh(), outputs=2))  # one place, 40 × 75; the head has room for one sample
    candidates = _candidates(classes=2)
    found = dm.test_membership(dm.observe(model, _first(candidates, 6)), candidates, "spans")
    assert found.layer == "0"
    assert found.members.tolist() == [True] * 6 + [False] * 14
    assert found.excluded.tolist() == [False] * 6 + [True] * 14


@pytest.mark.parametrize("method", ["spans", "alignment"])
def test_each_candidate_is_judged_by_itself(method):
    model, candidates = _built(_net()), _candidates()
    exposure = dm.observe(model, _first(candidates, 4))
    whole = dm.test_membership(exposure, candidates, method)
    part = dm.test_membership(exposure, dm.Batch(candidates.inputs[2:7], candidates.targets[2:7]), method)
    assert torch.allclose(whole.scores[4:7], part.scores[2:], atol=1e-3)
    assert whole.members[2:7].tolist() == part.members.tolist()


class Mixing(nn.Module):
    def forward(self, x):
        return x - x.mean(0, keepdim=True)


@pytest.mark.parametrize("layer", [nn.Dropout(0.5), Mixing()])
def test_spans_claim_nothing_where_a_samples_own_gradient_is_not_what_it_adds(layer):
    model, candidates = _built(_net(layer)).train(), _candidates()
    with pytest.raises(dm.Refused, match="mean over samples"):
        dm.test_membership(dm.observe(model, _first(candidates, 4)), candidates, "spans")


def test_spans_claim_nothing_of_a_sum_and_refuse_batch_norm_in_train_mode():
    candidates = _candidates()
    summed = dm.observe(_built(_net()), _first(candidates, 4), loss=nn.CrossEntropyLoss(reduction="sum"))
    with pytest.raises(dm.Refused, match="mean over samples"):
        dm.test_membership(summed, candidates, "spans")
    normed = _built(_net(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))).train()
    with pytest.raises(dm.Refused, match="spans needs a gradient of each sample"):
        dm.test_membership(dm.observe(normed, _first(candidates, 4)), candidates, "spans")
    assert dm.test_membership(dm.observe(normed, _first(candidates, 4)), candidates, "alignment").scores.isfinite().all()


def test_defenses_that_only_leave_layers_out_do_no_harm():
    model, candidates = _built(_net(nn.Flatten(), nn.Linear(192, 30), nn.ReLU())), _candidates()
    exposure = dm.observe(model, _first(candidates, 4), defenses=(dm.defense("head_withheld"),))
    found = dm.test_membership(exposure, candidates, "spans")
    assert found.layer == "1"
    assert found.members.tolist() == [True] * 4 + [False] * 16
    with pytest.raises(dm.Refused, match="likelihood scores candidates there"):
        dm.test_membership(dm.observe(model, _first(candidates, 4), defenses=(dm.defense("gaussian_noise", std=0.1),)), candidates, "spans")


@pytest.mark.parametrize("training", [dm.FedSGD(), dm.FedAvg(steps=3, learning_rate=0.05)])
def test_members_of_a_wide_model_point_along_the_update(training):
    """In a wide net other samples' gradients are nearly orthogonal: a member's cosine is near 1/√B of independent gradients."""
    model, candidates = _built(_net(nn.Flatten(), nn.Linear(192, 400), nn.ReLU())), _candidates(60)
    candidates = dm.Batch(candidates.inputs - 0.5, candidates.targets)
    found = dm.test_membership(dm.observe(model, _first(candidates, 4), training=training), candidates, "alignment")
    assert found.scores[:4].min() > 0.25
    assert found.scores[:4].mean() > found.scores[4:].mean() + 2 * found.scores[4:].std()
    assert not found.members.any()


def test_alignment_is_the_cosine_of_two_updates():
    model, candidates = _built(_net()), _candidates(6)
    exposure = dm.observe(model, _first(candidates, 3))
    found = dm.test_membership(exposure, candidates, "alignment")
    for place in range(6):
        alone = dm.observe(model, dm.Batch(candidates.inputs[place : place + 1], candidates.targets[place : place + 1])).update
        mine, sent = (torch.cat([update[name].flatten() for name in exposure.update]) for update in (alone, exposure.update))
        assert float(found.scores[place]) == pytest.approx(float(torch.cosine_similarity(mine, sent, dim=0)), abs=1e-5)


class Texts(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.mixing, self.head = nn.Embedding(200, 48), nn.Linear(48, 48), nn.Linear(48, 3)

    def forward(self, ids):
        return self.head(torch.tanh(self.mixing(self.embedding(ids))).mean(1))


def test_texts_are_decided_by_a_linear_layer_at_every_position_or_excluded_by_the_embedding():
    torch.manual_seed(2)
    model, ids, targets = Texts(), torch.randint(0, 200, (30, 6)), torch.randint(0, 3, (30,))
    candidates = dm.Batch(ids, targets)
    few = dm.test_membership(dm.observe(model, _first(candidates, 1)), candidates, "spans")
    assert few.members.tolist() == [True] + [False] * 29
    many = dm.test_membership(dm.observe(model, _first(candidates, 9)), candidates, "spans")
    assert many.layer == "embedding"
    assert not many.members.any()
    lacking = torch.tensor([not set(row) <= set(ids[:9].flatten().tolist()) for row in ids.tolist()])
    assert many.excluded.tolist() == lacking.tolist()
    assert int(lacking.sum()) > 15


def test_likelihood_needs_noise():
    model, candidates = _built(_net()), _candidates()
    with pytest.raises(dm.Refused, match="needs declared noise"):
        dm.test_membership(dm.observe(model, _first(candidates, 4)), candidates, "likelihood")
    with pytest.raises(ValueError, match="candidates: expected a Batch"):
        dm.test_membership(dm.observe(model, _first(candidates, 4)), candidates.inputs)


@pytest.mark.parametrize("outputs", [10, 2])
def test_no_member_is_claimed_under_a_class_that_the_layer_does_not_tell_from_its_own(outputs):
    """Two classes with equal rows in the head send equal slopes back; another layer than the head cannot tell which is the sample's."""
    model = _built(_net(nn.Flatten(), nn.Linear(192, 60), nn.ReLU(), outputs=outputs + 1))
    with torch.no_grad():
        model[-1].weight[outputs] = model[-1].weight[0]
    candidates = _candidates(8, classes=outputs)
    batch = _first(candidates, 3)
    batch.targets[:3] = torch.tensor([0, 1, 1])
    exposure = dm.observe(model, batch, defenses=(dm.defense("head_withheld"),))
    renamed = dm.Batch(candidates.inputs, torch.cat([torch.tensor([outputs, 1, 1]), candidates.targets[3:]]))
    found = dm.test_membership(exposure, renamed, "spans")
    assert found.members.tolist() == [False, True, True] + [False] * 5
    assert not found.excluded[0]
    assert "another label" in found.message
    assert dm.test_membership(exposure, batch, "spans").members.tolist() == [False, True, True]
