"""The defenses that withhold layers: head_withheld, bias_withheld, only_layer and bias_free_head."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def _sent(model, batch, name, **options):
    return set(dm.observe(model, batch, defenses=(dm.defense(name, **options),)).update)


def test_head_withheld_keeps_the_proven_head_at_home(classifier, batch):
    assert _sent(classifier, batch, "head_withheld") == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_a_withheld_head_is_refused_to_methods_that_need_it(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("head_withheld"),))
    with pytest.raises(dm.Refused, match=r"needs the head gradient: the client withholds the last layer"):
        dm.recover_labels(exposure, "idlg")


@pytest.mark.parametrize(
    ("scope", "withheld"), [("head", {"5.bias"}), ("linear", {"3.bias", "5.bias"}), ("all", {"0.bias", "3.bias", "5.bias"})]
)
def test_biases_are_withheld_by_scope(classifier, batch, scope, withheld):
    everything = {name for name, _ in classifier.named_parameters()}
    assert _sent(classifier, batch, "bias_withheld", scope=scope) == everything - withheld


def test_only_layer_takes_a_module_or_a_parameter(classifier, batch):
    assert _sent(classifier, batch, "only_layer", layer="3") == {"3.weight", "3.bias"}
    assert _sent(classifier, batch, "only_layer", layer="5.bias") == {"5.bias"}


def test_what_is_sent_is_exact(classifier, batch):
    plain = dm.observe(classifier, batch).update
    sent = dm.observe(classifier, batch, defenses=(dm.defense("only_layer", layer="3"),)).update
    assert torch.equal(sent["3.weight"], plain["3.weight"])


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(classifier, batch):
    with pytest.raises(ValueError, match=r"defense\.layer: the model has no parameters under 'fc'; it has: 0\.weight"):
        _sent(classifier, batch, "only_layer", layer="fc")


def test_withholding_all_that_there_is_is_refused(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(ValueError, match=r"the client sent no layer at all"):
        _sent(model, batch, "head_withheld")


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


@pytest.mark.parametrize("name", ["head_withheld", "bias_withheld", "bias_free_head", "dropout", "precode"])
def test_a_model_without_a_head_is_refused(name, batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))
    with pytest.raises(dm.Refused, match=r"is not the model's output"):
        _sent(model, batch, name)
