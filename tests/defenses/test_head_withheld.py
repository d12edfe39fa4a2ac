import pytest
from torch import nn

import dosimeter as dm


def _sent(model, batch, name, **options):
    return set(dm.observe(model, batch, defenses=(dm.defense(name, **options),)).update)


def test_head_withheld_keeps_the_proven_head_at_home(classifier, batch):
    assert _sent(classifier, batch, "head_withheld") == {"0.weight", "0.bias", "3.weight", "3.bias"}


def test_a_withheld_head_is_refused_to_methods_that_need_it(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("head_withheld"),))
    with pytest.raises(dm.Refused, match="withholds the last layer"):
        dm.recover_labels(exposure, "idlg")


def test_withholding_all_that_there_is_is_refused(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(dm.Refused, match="every layer that this model trains is withheld"):
        _sent(model, batch, "head_withheld")


def test_a_weight_that_the_head_shares_stays_at_home_too(tied, batch):
    assert set(dm.observe(tied, batch).update) >= {"below.weight", "head.bias"}
    assert _sent(tied, batch, "head_withheld") == {"first.weight", "first.bias", "below.bias", "back.weight", "back.bias"}


def test_what_the_head_is_made_from_stays_at_home(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(12, 10)))
    assert _sent(model, batch, "head_withheld") == {"1.weight", "1.bias"}
