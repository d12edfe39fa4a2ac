import math
from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import BinaryCrossEntropy
from dosimeter.defenses.random_labels import keep_probability
from dosimeter.interfaces import Client
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


def test_random_labels_stay_with_the_probability_of_their_epsilon(client):
    labels = torch.full((30_000,), 7)
    many = replace(client, batch=dm.Batch(torch.zeros(30_000, 1, 8, 8), labels))
    answered = _defended(many, "random_labels", epsilon=2.0).batch.targets
    shares = torch.bincount(answered, minlength=10) / 30_000
    keep = math.exp(2) / (math.exp(2) + 9)
    assert shares[7].item() == pytest.approx(keep, abs=0.01)
    others = shares[torch.arange(10) != 7]
    assert torch.allclose(others, torch.full((9,), (1 - keep) / 9), atol=0.006)
    assert math.log(shares[7] / others.mean()) == pytest.approx(2.0, abs=0.05)


def test_random_labels_of_soft_targets_are_refused(client):
    soft = replace(client, batch=dm.Batch(client.batch.inputs, torch.full((6, 10), 0.1)))
    with pytest.raises(dm.Refused, match="this batch has soft labels"):
        _defended(soft, "random_labels", epsilon=1.0)


def test_a_yes_or_no_question_is_answered_at_random(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    client = Client(
        model=model,
        batch=dm.Batch(torch.zeros(4000, 1, 8, 8), torch.ones(4000, dtype=torch.int64)),
        training=dm.FedSGD(),
        loss=BinaryCrossEntropy(),
    )
    assert _defended(client, "random_labels", epsilon=0.0).batch.targets.float().mean().item() == pytest.approx(0.5, abs=0.04)


@pytest.mark.parametrize(("epsilon", "classes", "keep"), [(math.log(3), 2, 0.75), (0.0, 10, 0.1), (math.inf, 10, 1.0)])
def test_randomised_response_by_hand(epsilon, classes, keep):
    assert keep_probability(epsilon, classes) == pytest.approx(keep)
