"""Arguments of the public functions that are no dense tensors, no batches or no exposures: each is refused in a sentence."""

import numpy as np
import pytest
import torch
from torch import nn

import dosimeter as dm

INPUTS, TARGETS = torch.rand(4, 3, 4, 4), torch.arange(4)
BATCH = dm.Batch(INPUTS, TARGETS)
DENSE = "expected a dense tensor with values"
REAL = r"expected (real numbers|half, single or double precision|a dense tensor of half, .*), got torch.(complex|float8)"
ODD = {
    "nested": (lambda tensor: torch.nested.nested_tensor([tensor, tensor]), DENSE),
    "sparse": (lambda tensor: tensor.to_sparse(), DENSE),
    "meta": (lambda tensor: tensor.to("meta"), DENSE),
    "quantised": (lambda tensor: torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.quint8), DENSE),
    "complex": (lambda tensor: tensor + 0j, REAL),
    "8 bits": (lambda tensor: tensor.float().to(torch.float8_e4m3fn), REAL),
}
odd = pytest.mark.parametrize(("change", "words"), ODD.values(), ids=ODD)


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 5)).eval()


@pytest.fixture(scope="module")
def exposure(model):
    return dm.observe(model, BATCH)


@odd
def test_odd_tensors_are_refused_everywhere(model, exposure, change, words, tmp_path):
    inputs, targets = dm.Batch(change(INPUTS), TARGETS), dm.Batch(INPUTS, change(TARGETS))
    update = {name: change(tensor) for name, tensor in exposure.update.items()}
    found = dm.recover_labels(exposure, "idlg")
    picture = dm.Reconstruction(inputs=change(INPUTS), labels=TARGETS, outcome=dm.Outcome.COMPLETED, objective=0.0)
    for batch in (inputs, targets):
        for call in (dm.observe, lambda model, batch: dm.inspect(model, batch=batch), dm.ceilings):
            with pytest.raises(ValueError, match=words):
                call(model, batch)
        with pytest.raises(ValueError, match=words):
            dm.score(found, batch)
        with pytest.raises(ValueError, match=words):
            dm.test_membership(exposure, batch)
    for call in (
        lambda: dm.receive(model, update, input_shape=(3, 4, 4)),
        lambda: dm.reconstruct(exposure, "dlg", labels=change(TARGETS), steps=1),
        lambda: dm.score(picture, BATCH),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    with pytest.raises(ValueError, match=words):
        dm.write_capture(tmp_path, update, kind="gradient")
    assert not list(tmp_path.iterdir())
    if words is DENSE:
        with pytest.raises(ValueError, match=words):
            dm.preflight(model, update, input_shape=(3, 4, 4))


@pytest.mark.parametrize("kind", [torch.int8, torch.uint8, torch.int16, torch.int32])
def test_class_ids_of_any_integer_type_are_the_same_labels(model, exposure, kind):
    wanted, given = dm.recover_features(exposure, "rgla", labels=TARGETS, steps=3), TARGETS.to(kind)
    assert torch.equal(dm.recover_features(exposure, "rgla", labels=given, steps=3).features, wanted.features)
    inspected = [dm.inspect(model, batch=dm.Batch(INPUTS, ids)).findings for ids in (TARGETS, given)]
    assert str(inspected[0]) == str(inspected[1])


def test_booleans_are_no_labels(exposure):
    with pytest.raises(ValueError, match=r"expected .B,. class ids"):
        dm.reconstruct(exposure, "dlg", labels=TARGETS > 1, steps=1)


@pytest.mark.parametrize("thing", [None, 3, "x", {}, INPUTS, BATCH])
def test_what_is_no_exposure_is_refused(thing):
    for call in (
        lambda: dm.recover_labels(thing, "idlg"),
        lambda: dm.identifiability(thing),
        lambda: dm.dose([thing]),
        lambda: dm.test_membership(thing, BATCH),
    ):
        with pytest.raises(TypeError, match=r"expected an Exposure, as dm.observe and dm.receive give it"):
            call()


@pytest.mark.parametrize("thing", [None, 3, b"x", BATCH])
def test_what_is_no_path_is_refused(model, thing):
    nothing = dict.fromkeys(("features", "maps", "targets", "tokens", "attacks"), ())
    for call in (lambda: dm.read_capture(thing), lambda: dm.audit(model, BATCH, labels=["idlg"], **nothing).save(thing)):
        with pytest.raises(TypeError, match="expected a path"):
            call()


def test_other_arguments_of_the_wrong_kind_are_refused(exposure):
    for truth in (None, 3, dm.Batch(torch.tensor(1.0), TARGETS), dm.Batch(INPUTS, torch.tensor(1)), dm.Batch(INPUTS[:0], TARGETS[:0])):
        with pytest.raises(ValueError, match="expected a Batch of at least one sample"):
            dm.score(dm.recover_labels(exposure, "idlg"), truth)
        with pytest.raises(ValueError, match="expected a Batch of at least one sample"):
            dm.test_membership(exposure, truth)
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module"):
        dm.attack("gradfilt", targets=(3,)).tamper(3)
    with pytest.raises(ValueError, match="no attack named"):
        dm.attack({})
    with pytest.raises(ValueError, match="a row of 1099511627780 classes for each sample needs about"):
        dm.score(dm.recover_labels(exposure, "idlg"), dm.Batch(INPUTS, TARGETS + 2**40))
    with pytest.raises(TypeError, match="progress: expected a function, got int"):
        dm.audit(exposure=exposure, progress=3)
    for call in (dm.dose, dm.aggregate):
        with pytest.raises(TypeError, match="expected a list"):
            call(3)


def test_arrays_of_the_other_byte_order_and_odd_names_are_read(model, exposure):
    arrays = {name: tensor.numpy().astype(">f4") for name, tensor in exposure.update.items()}
    received = dm.receive(model, arrays, input_shape=(3, 4, 4)).update
    assert all(torch.equal(received[name], tensor) for name, tensor in exposure.update.items())
    with pytest.raises(ValueError, match="3"):
        dm.receive(model, {3: np.zeros(2)}, input_shape=(3, 4, 4))
