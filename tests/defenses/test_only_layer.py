import pytest
import torch

import dosimeter as dm


def _sent(model, batch, name, **options):
    return set(dm.observe(model, batch, defenses=(dm.defense(name, **options),)).update)


def test_only_layer_takes_a_module_or_a_parameter(classifier, batch):
    assert _sent(classifier, batch, "only_layer", layer="3") == {"3.weight", "3.bias"}
    assert _sent(classifier, batch, "only_layer", layer="5.bias") == {"5.bias"}


def test_what_is_sent_is_exact(classifier, batch):
    plain = dm.observe(classifier, batch).update
    sent = dm.observe(classifier, batch, defenses=(dm.defense("only_layer", layer="3"),)).update
    assert torch.equal(sent["3.weight"], plain["3.weight"])


def test_a_layer_that_is_not_there_is_refused_with_those_that_are(classifier, batch):
    with pytest.raises(ValueError, match=r"defense\.layer: .* no parameters under 'fc'"):
        _sent(classifier, batch, "only_layer", layer="fc")
