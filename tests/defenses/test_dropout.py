import copy

import pytest
import torch
from torch import nn

import dosimeter as dm


def _trained_behind(model, batch, name, seed=0, **options):
    return dm.observe(model.train(), batch, defenses=(dm.defense(name, **options),), seed=seed)


def test_dropout_zeroes_about_its_rate_of_a_single_samples_head_columns(digits):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 2000), nn.Sigmoid(), nn.Linear(2000, 10))
    exposure = _trained_behind(model, dm.Batch(digits[0][:1], digits[1][:1]), "dropout", rate=0.3)
    dropped = (exposure.update["3.weight"] == 0).all(0).float().mean().item()
    assert dropped == pytest.approx(0.3, abs=0.05)


def test_dropout_keeps_names_and_is_what_pytorch_does(classifier, batch):
    exposure = _trained_behind(classifier, batch, "dropout", rate=0.5)
    assert set(exposure.update) == {name for name, _ in classifier.named_parameters()}
    torch.manual_seed(3)
    ours = exposure.model(batch.inputs)
    torch.manual_seed(3)
    theirs = classifier[5](nn.Dropout(0.5)(classifier[:5](batch.inputs)))
    assert torch.equal(ours, theirs)
    assert torch.equal(exposure.model.eval()(batch.inputs), classifier.eval()(batch.inputs))


def test_dropout_survives_a_copy(classifier, batch):
    model = copy.deepcopy(_trained_behind(classifier, batch, "dropout").model)
    assert not torch.equal(model(batch.inputs), model(batch.inputs))


def test_a_rate_of_one_is_refused():
    with pytest.raises(ValueError, match=r"defense\.rate: expected a number in \[0, 1\)"):
        dm.defense("dropout", rate=1.0)
