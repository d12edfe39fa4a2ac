import pytest

import dosimeter as dm


def _sent(model, batch, name, **options):
    return set(dm.observe(model, batch, defenses=(dm.defense(name, **options),)).update)


@pytest.mark.parametrize(
    ("scope", "withheld"), [("head", {"5.bias"}), ("linear", {"3.bias", "5.bias"}), ("all", {"0.bias", "3.bias", "5.bias"})]
)
def test_biases_are_withheld_by_scope(classifier, batch, scope, withheld):
    everything = {name for name, _ in classifier.named_parameters()}
    assert _sent(classifier, batch, "bias_withheld", scope=scope) == everything - withheld


def test_an_unknown_scope_is_refused():
    with pytest.raises(ValueError, match=r"defense\.scope: expected one of"):
        dm.defense("bias_withheld", scope="none")


def test_a_bias_that_the_head_shares_is_withheld_under_its_other_name(tied, batch):
    tied.head.bias = tied.below.bias
    sent = dm.observe(tied, batch, defenses=(dm.defense("bias_withheld", scope="head"),)).update
    assert set(sent) == {"first.weight", "first.bias", "below.weight", "back.weight", "back.bias"}
