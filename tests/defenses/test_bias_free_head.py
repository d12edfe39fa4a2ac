import torch
from torch import nn

import dosimeter as dm


def test_a_bias_free_head_gives_the_logits_without_the_bias(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("bias_free_head"),))
    with torch.no_grad():
        difference = classifier(batch.inputs) - exposure.model(batch.inputs)
    assert torch.allclose(difference, classifier[5].bias.expand_as(difference), atol=1e-6)
    assert set(exposure.update) == {"0.weight", "0.bias", "3.weight", "3.bias", "5.weight"}


def test_a_head_that_has_no_bias_stays(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    plain = dm.observe(model, batch).update
    assert torch.equal(dm.observe(model, batch, defenses=(dm.defense("bias_free_head"),)).update["1.weight"], plain["1.weight"])
