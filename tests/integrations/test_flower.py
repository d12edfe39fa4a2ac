"""The taps in Flower: what is written, in which order mods see it, and what is held back. A real simulation is among the slow tests."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.captures.store import captures_in, read_model

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'dosimeter[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from flwr.supercore.task_identity import TaskIdentity

from dosimeter.integrations.flower import HELD_BACK, CaptureMod, CapturingStrategy
from dosimeter.integrations.gates import proved


@pytest.fixture(autouse=True)
def _a_run(monkeypatch):
    """Messages belong to a run; without a federation there is none."""
    for name, value in (("_run_id", 1), ("_task_id", 1), ("_node_id", 7)):
        monkeypatch.setattr(TaskIdentity, name, value)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Linear(24, 10))


def _message(state, node=7, kind="train") -> Message:
    content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"server-round": 3})})
    return Message(content, dst_node_id=node, message_type=kind)


def _client(message, context):
    """One step of SGD on four samples, as Flower's quickstart writes it."""
    model = _net()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    inputs, targets = torch.rand(4, 16, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 3, 5, 9])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    nn.functional.cross_entropy(model(inputs), targets).backward()
    optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": 4})})
    return Message(content, reply_to=message)


def _context() -> Context:
    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})


def test_the_mod_writes_what_leaves_and_passes_it_on(tmp_path):
    mod = CaptureMod(tmp_path, training=dm.FedAvg(learning_rate=0.1), input_shape=(16,))
    reply = mod(_message(_net().state_dict()), _context(), _client)
    (path,) = captures_in(tmp_path)
    capture = dm.read_capture(path)
    assert (capture.round, capture.client, capture.kind) == (3, "7", "weights")
    sent = reply.content["arrays"].to_torch_state_dict()
    assert all(torch.equal(capture.update[name], value) for name, value in sent.items())
    model = _net()
    model.load_state_dict(read_model(path, capture))
    labels = dm.recover_labels(capture.receive(model), "subspace")
    assert labels.certified
    assert labels.labels.tolist() == [0, 3, 5, 9]


def test_the_first_mod_sees_what_the_others_changed(tmp_path):
    def doubling(message, context, call_next):
        reply = call_next(message, context)
        arrays = {name: value * 2 for name, value in reply.content["arrays"].to_torch_state_dict().items()}
        reply.content["arrays"] = ArrayRecord(arrays)
        return reply

    mod = CaptureMod(tmp_path)
    mod(_message(_net().state_dict()), _context(), lambda message, context: doubling(message, context, _client))
    captured = dm.read_capture(captures_in(tmp_path)[0]).update["1.weight"]
    plain = _client(_message(_net().state_dict()), _context()).content["arrays"].to_torch_state_dict()["1.weight"]
    assert torch.equal(captured, plain * 2)


def test_an_update_that_proves_something_is_held_back():
    mod = CaptureMod(None, model=_net(), forbid=proved, training=dm.FedAvg(learning_rate=0.1), input_shape=(16,))
    reply = mod(_message(_net().state_dict()), _context(), _client)
    assert reply.has_error()
    assert reply.error.code == HELD_BACK
    assert "labels" in reply.error.reason


def test_evaluation_passes_untouched(tmp_path):
    mod = CaptureMod(tmp_path)
    assert mod(_message(_net().state_dict(), kind="evaluate"), _context(), _client).has_content()
    assert not captures_in(tmp_path)


def test_a_gate_needs_the_model():
    with pytest.raises(ValueError, match="forbid"):
        CaptureMod(None, forbid=proved)


def test_a_model_that_cannot_be_inspected_is_not_trained_on():
    """A server that sends other tensors gets a reason, not a traceback. A wrapper's names are no other tensors."""
    mod, trained = CaptureMod(None, model=_net()), []

    def client(message, context):
        trained.append(message)
        return Message(RecordDict(), reply_to=message)

    reply = mod(_message(nn.Linear(16, 10).state_dict()), _context(), client)
    assert reply.error.code == HELD_BACK
    assert "the model that arrived could not be inspected" in reply.error.reason
    assert trained == []
    mod(_message({f"_orig_mod.{name}": tensor for name, tensor in _net().state_dict().items()}), _context(), client)
    assert len(trained) == 1


def test_a_folder_that_cannot_be_written_does_not_end_the_round(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    reply = CaptureMod(tmp_path / "file")(_message(_net().state_dict()), _context(), _client)
    assert reply.has_content()
    assert "was not captured" in caplog.text


def test_the_strategy_keeps_every_reply_with_the_model_that_was_sent(tmp_path):
    class Sending(FedAvg):
        def configure_train(self, server_round, arrays, config, grid):
            return [_message(arrays.to_torch_state_dict(), node) for node in (1, 2, 3)]

    strategy = CapturingStrategy(Sending(), tmp_path, training=dm.FedAvg(learning_rate=0.1), input_shape=(16,))
    messages = strategy.configure_train(1, ArrayRecord(_net().state_dict()), ConfigRecord(), None)
    replies = [_client(message, None) for message in messages[:2]] + [Message(Error(1, "gone"), reply_to=messages[2])]
    for reply, node in zip(replies, (1, 2, 3)):
        reply.metadata.__dict__["_src_node_id"] = node
    arrays, _ = strategy.aggregate_train(1, replies)
    assert arrays is not None
    found = [dm.read_capture(path) for path in captures_in(tmp_path)]
    assert sorted(capture.client for capture in found) == ["1", "2"]
    assert len(list(tmp_path.glob("model-*"))) == 1
    assert read_model(captures_in(tmp_path)[0], found[0]) is not None


@pytest.mark.slow
def test_the_example_runs_a_real_simulation(tmp_path):
    script = Path(__file__).parents[2] / "examples" / "flower" / "federation.py"
    environment = os.environ | {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    subprocess.run([sys.executable, script, "--out", tmp_path, "--audit", "none"], check=True, timeout=600, env=environment)
    found = [dm.read_capture(path) for path in captures_in(tmp_path / "captures")]
    assert sorted((capture.round, capture.client) for capture in found) == sorted((r, c) for r in (1, 2) for c in {f.client for f in found})
    assert len(found) == 8
