"""Ceilings in an audit: the records hold what dm.ceilings gives, for honest servers only, within the time of an attack."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.records import read_records
from dosimeter.runs.gate import parse_condition

QUICK = {"labels": [], "features": [], "maps": [], "attacks": [dm.attack("inverting_gradients", steps=3)], "attack_labels": "given"}
NOISE = (dm.defense("gaussian_noise", std=0.05),)


@pytest.fixture(scope="module")
def setting():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Flatten(), nn.Linear(36, 12), nn.Tanh(), nn.Linear(12, 4))
    images = torch.rand(60, 1, 6, 6)
    return model, dm.Batch(images[:3], torch.tensor([0, 1, 3])), dm.Batch(images[3:], torch.zeros(57, dtype=torch.int64))


def test_the_records_hold_what_ceilings_gives(setting, tmp_path):
    model, batch, auxiliary = setting
    dm.audit(model, batch, auxiliary=auxiliary, defenses=NOISE, out=tmp_path, adaptive=False, **QUICK)
    (record,) = read_records(tmp_path)
    direct = dm.ceilings(model, batch, auxiliary=auxiliary, defenses=NOISE, bounds=["van_trees"]).found[0]
    held = record.details["ceiling"]
    assert held["psnr"] == pytest.approx(direct.values.tolist(), abs=1e-9)
    assert held["bounds"]["psnr"]["bound"] == "van_trees"
    assert held["bounds"]["psnr"]["proved"] is True
    assert "clipped" in held["refused"]["reconstruction_robustness"]
    highest = max(held["psnr"])
    assert parse_condition(f"inputs.ceiling.psnr > {highest - 0.01}").failure([record])
    assert parse_condition(f"inputs.ceiling.psnr > {highest + 0.01}").failure([record]) is None


def test_without_noise_the_estimate_takes_the_place_of_the_theorem_and_clipped_noise_has_both(setting):
    model, batch, auxiliary = setting
    plain = dm.audit(model, batch, auxiliary=auxiliary, **QUICK).records[0].details["ceiling"]
    assert plain["bounds"]["psnr"]["bound"] == "hidden_directions"
    assert min(plain["psnr"]) > 60
    private = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=2.0),)
    both = dm.audit(model, batch, auxiliary=auxiliary, defenses=private, adaptive=False, **QUICK).records[0].details["ceiling"]
    assert set(both["bounds"]) == {"psnr", "identified"}
    assert both["identified"] == pytest.approx([0.2175] * 3, abs=1e-3)  # Φ(Φ⁻¹(.1) + 1/2)


def test_no_ceiling_holds_for_a_changed_model_or_where_nobody_asks(setting):
    model, batch, auxiliary = setting
    assert "ceiling" not in dm.audit(model, batch, auxiliary=auxiliary, ceilings=False, **QUICK).records[0].details
    active = QUICK | {"attacks": [dm.attack("imprint", bins=8)]}
    record = dm.audit(model, batch, auxiliary=auxiliary, **active).records[0]
    assert record.method == "imprint"
    assert "ceiling" not in record.details


def test_a_bound_that_takes_longer_than_the_audit_may_is_left_out_with_a_sentence(setting):
    model, batch, auxiliary = setting
    record = dm.audit(model, batch, auxiliary=auxiliary, defenses=NOISE, max_seconds=1e-4, adaptive=False, **QUICK).records[0]
    assert "psnr" not in record.details["ceiling"]
    assert "longer than an attack" in record.details["ceiling"]["refused"]["van_trees"]


def test_without_auxiliary_samples_the_record_says_why_there_is_no_ceiling(setting):
    model, batch, _ = setting
    held = dm.audit(model, batch, **QUICK).records[0].details["ceiling"]
    assert held["bounds"] == {}
    assert "auxiliary" in held["refused"]["hidden_directions"]
