from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy
from dosimeter.randomness import generator


def _defended(client, name, seed=0, **options):
    return dm.defense(name, **options)(client, generator(seed, "defense"))


@pytest.mark.parametrize("convention", ["pytorch", "thesis"])
def test_label_smoothing_is_the_smoothed_loss(classifier, batch, convention):
    behind = dm.observe(classifier, batch, defenses=(dm.defense("label_smoothing", smoothing=0.3, convention=convention),)).update
    direct = dm.observe(classifier, batch, loss=CrossEntropy(smoothing=0.3, convention=convention)).update
    assert all(torch.equal(behind[name], direct[name]) for name in direct)


def test_label_smoothing_agrees_with_pytorch(classifier, batch):
    classifier.zero_grad()
    nn.CrossEntropyLoss(label_smoothing=0.3)(classifier(batch.inputs), batch.targets).backward()
    sent = dm.observe(classifier, batch, defenses=(dm.defense("label_smoothing", smoothing=0.3),)).update
    assert torch.allclose(sent["5.weight"], classifier[5].weight.grad, atol=1e-6)


def test_label_smoothing_softens_the_targets_of_other_losses(client):
    soft = _defended(replace(client, loss=BinaryCrossEntropy()), "label_smoothing", smoothing=0.5).batch.targets
    expected = torch.full((6, 10), 0.05)
    expected[torch.arange(6), client.batch.targets] = 0.55
    assert torch.allclose(soft, expected)
