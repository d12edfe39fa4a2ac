"""Where a run computes: the device that is named, else a GPU where there is one; the caller's objects stay where they are."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.runs import devices
from dosimeter.runs.devices import choose_device, device_name, model_on, to_device

META = torch.device("meta")


def test_without_a_gpu_the_model_stays_where_it_is():
    assert choose_device(None).type == choose_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert choose_device("cpu", like=nn.Linear(2, 2)) == torch.device("cpu")
    assert choose_device(None, like=nn.Linear(2, 2, device="meta")) == META


def test_a_gpu_is_used_where_there_is_one(monkeypatch, caplog):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Test GPU")
    monkeypatch.setattr(devices._log, "propagate", True)
    caplog.set_level("INFO", logger="dosimeter")
    assert choose_device(None, like=nn.Linear(2, 2)).type == "cuda"
    assert set(caplog.messages) == {"on cuda (Test GPU)"}  # twice, where another test gave the logger a handler of its own
    assert device_name(torch.device("cpu")) == "cpu"
    assert choose_device("cpu").type == "cpu"


def test_what_moves_is_a_copy():
    model, batch = nn.Linear(2, 2), dm.Batch(torch.rand(1, 2), torch.tensor([0]))
    assert model_on(model, torch.device("cpu")) is model
    assert to_device(batch, torch.device("cpu")) is batch
    assert to_device(None, META) is None
    assert to_device(batch, META).inputs.device == META
    moved = model_on(model, META)
    assert next(moved.parameters()).device == META
    assert next(model.parameters()).device.type == "cpu"


def test_a_device_that_is_not_there_is_refused(classifier, batch):
    with pytest.raises(ValueError, match="device: 'warp' cannot be used here"):
        dm.audit(classifier, batch, device="warp")


def test_a_record_says_where_it_was_made(classifier, batch):
    (record,) = dm.audit(classifier, batch, labels=["idlg"], features=[], maps=[], attacks=[], device="cpu").records
    assert record.versions["device"] == "cpu"
