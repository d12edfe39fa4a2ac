import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.defenses.soteria import feature_scores


def test_scores_of_a_linear_representation_are_features_over_weight_norms(rng):
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 3)).double()
    inputs = torch.randn(5, 6, generator=rng, dtype=torch.float64)
    with torch.no_grad():
        expected = (model[0](inputs).abs() / model[0].weight.norm(dim=1)).sum(0)
    assert torch.allclose(feature_scores(model, "1", inputs), expected)


def test_scores_agree_with_the_whole_jacobian(classifier, batch):
    images = batch.inputs[:2]
    jacobian = torch.autograd.functional.jacobian(classifier[:5], images)  # (2, 12, 2, 1, 8, 8)
    features = classifier[:5](images)
    slopes = torch.stack([jacobian[i, :, i].flatten(1).norm(dim=1) for i in range(2)])
    expected = torch.where(features > 0, features.abs() / slopes.clamp_min(1e-30), 0).sum(0)
    assert torch.allclose(feature_scores(classifier, "5", images), expected, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_probes_estimate_the_scores(seed, classifier, batch):
    exact = feature_scores(classifier, "5", batch.inputs)
    rough, fine = (feature_scores(classifier, "5", batch.inputs, count, torch.Generator().manual_seed(seed)) for count in (8, 2000))
    assert torch.allclose(fine, exact, rtol=0.1)
    assert not torch.allclose(rough, fine, rtol=0.01)
    chosen = [set(scores.topk(6).indices.tolist()) for scores in (exact, rough)]
    assert len(chosen[0] & chosen[1]) >= 5


def test_the_seed_decides_on_the_probes(classifier, batch):
    defense = dm.defense("soteria", ratio=0.25, probes=1)
    sent = [dm.observe(classifier, batch, defenses=(defense,), seed=seed).update["5.weight"] for seed in (0, 0, *range(1, 9))]
    assert torch.equal(sent[0], sent[1])
    assert not all(torch.equal(sent[0], other) for other in sent[2:])


def test_the_most_telling_columns_and_nothing_else_are_zeroed(classifier, batch):
    plain = dm.observe(classifier, batch).update
    sent = dm.observe(classifier, batch, defenses=(dm.defense("soteria", ratio=0.25),)).update
    telling = feature_scores(classifier, "5", batch.inputs).topk(3).indices
    rest = [i for i in range(12) if i not in telling.tolist()]
    assert sent["5.weight"][:, telling].abs().max() == 0
    assert torch.equal(sent["5.weight"][:, rest], plain["5.weight"][:, rest])
    assert all(torch.equal(sent[name], plain[name]) for name in plain if name != "5.weight")
    assert plain["5.weight"][:, telling].abs().max() > 0


def test_a_ratio_above_one_is_refused():
    with pytest.raises(ValueError, match=r"defense\.ratio: expected a number in \[0, 1\]"):
        dm.defense("soteria", ratio=40)


def test_a_head_whose_weight_is_shared_is_refused(tied, batch):
    with pytest.raises(dm.Refused, match=r"'head\.weight' is shared"):
        dm.observe(tied, batch, defenses=(dm.defense("soteria", ratio=0.5),))
