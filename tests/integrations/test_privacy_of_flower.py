"""Privacy settings against Flower's own code: the noise it adds, the norms it clips to, and what it lets pass."""

import math

import numpy as np
import pytest
import torch

import dosimeter as dm
from dosimeter.captures.store import captures_in

pytest.importorskip("flwr", reason="Flower is not installed: pip install 'dosimeter[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp.strategy import (
    DifferentialPrivacyClientSideAdaptiveClipping,
    DifferentialPrivacyServerSideAdaptiveClipping,
    DifferentialPrivacyServerSideFixedClipping,
    FedAvg,
)
from flwr.supercore.task_identity import TaskIdentity

from dosimeter.integrations.flower import CaptureMod, CapturingStrategy

LOCAL = {"clipping_norm": 0.5, "sensitivity": 0.25, "epsilon": 2.0, "delta": 1e-5}


@pytest.fixture(autouse=True)
def _a_run(monkeypatch):
    for name, value in (("_run_id", 1), ("_task_id", 1), ("_node_id", 7)):
        monkeypatch.setattr(TaskIdentity, name, value)


def message(state) -> Message:
    content = RecordDict({"arrays": ArrayRecord(state), "config": ConfigRecord({"server-round": 1})})
    return Message(content, dst_node_id=7, message_type="train")


def context() -> Context:
    return Context(run_id=1, node_id=7, node_config={}, state=RecordDict(), run_config={})


def client(change):
    """A client whose update is `change`."""

    def train(received, _):
        state = received.content["arrays"].to_torch_state_dict()
        arrays = ArrayRecord({name: value + change[name] for name, value in state.items()})
        return Message(RecordDict({"arrays": arrays, "metrics": MetricRecord({"num-examples": 1})}), reply_to=received)

    return train


def test_local_noise_is_what_the_setting_says():
    before = {"w": torch.zeros(200_000)}
    change = {"w": torch.full((200_000,), 0.01)}  # a norm of 4.5, above the clipping norm
    reply = LocalDpMod(**LOCAL)(message(before), context(), client(change))
    sent = reply.content["arrays"].to_torch_state_dict()["w"]
    setting = dm.privacy(LocalDpMod(**LOCAL))
    assert setting == dm.privacy("flower_local_dp", **LOCAL)
    assert float(sent.std()) == pytest.approx(setting.deviation, rel=0.02)
    along = float(sent @ change["w"] / change["w"].norm())
    assert abs(along - LOCAL["clipping_norm"]) < 6 * setting.deviation


def test_a_count_of_batches_leaves_as_it_is():
    """Why `whole_numbers` proves nothing: noise below one is cut off."""
    options = LOCAL | {"clipping_norm": 100.0, "sensitivity": 0.01}
    before = {"w": torch.zeros(3), "num_batches_tracked": torch.tensor(0)}
    change = {"w": torch.ones(3), "num_batches_tracked": torch.tensor(5)}
    reply = LocalDpMod(**options)(message(before), context(), client(change))
    assert int(reply.content["arrays"].to_torch_state_dict()["num_batches_tracked"]) == 5


def test_strategies_are_read():
    fixed = DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.5, 0.7, 10)
    assert dm.privacy(fixed) == dm.privacy("flower_fixed_clipping", noise_multiplier=1.5, clipping_norm=0.7, num_sampled_clients=10)
    for kind, side in (
        (DifferentialPrivacyServerSideAdaptiveClipping, "server"),
        (DifferentialPrivacyClientSideAdaptiveClipping, "client"),
    ):
        setting = dm.privacy(kind(FedAvg(), 0.8, 100))
        assert (setting.clipped_by, setting.num_sampled_clients) == (side, 100)
        assert setting.noise_multiplier == pytest.approx(0.8)


def test_adaptive_noise_follows_the_next_rounds_norm():
    """The departure that the proof pays for: all clients clipped, so that the norm sinks before the noise is scaled."""
    strategy = DifferentialPrivacyServerSideAdaptiveClipping(FedAvg(), 1.0, 100, initial_clipping_norm=1.0, clipped_count_stddev=5.0)
    before = strategy.clipping_norm
    strategy._geometric_update(1.0)
    noisy = strategy._add_noise_to_aggregated_arrays(ArrayRecord({"w": torch.zeros(100_000)})).to_torch_state_dict()["w"]
    factor = float(noisy.std()) / (strategy.noise_multiplier * before / 100)
    assert factor == pytest.approx(math.exp(-0.2 * 0.5), rel=0.02)
    assert dm.privacy(strategy).least_factor <= factor


def test_captures_keep_the_setting(tmp_path):
    mod = LocalDpMod(**LOCAL)
    tap = CaptureMod(tmp_path, privacy=mod, training=dm.FedAvg(learning_rate=0.1), input_shape=(3,))
    tap(message({"w": torch.zeros(3)}), context(), lambda received, _: mod(received, context(), client({"w": torch.ones(3)})))
    assert dm.read_capture(captures_in(tmp_path)[0]).privacy == dm.privacy("flower_local_dp", **LOCAL)
    strategy = CapturingStrategy(DifferentialPrivacyServerSideFixedClipping(FedAvg(), 1.0, 1.0, 4), tmp_path)
    assert strategy.facts["privacy"].name == "flower_fixed_clipping"
    assert CapturingStrategy(FedAvg(), tmp_path).facts["privacy"] is None


def test_a_trial_of_flowers_own_mod_agrees_with_the_proof():
    """Flower's own noise on two opposite updates, told apart: the shown ε is below the proved one, and above the typed one."""
    from dosimeter.engines.privacy_trial import shown_epsilon

    options = LOCAL | {"clipping_norm": 1.0}
    mod, setting, draws = LocalDpMod(**options), dm.privacy("flower_local_dp", **options), 800
    scores = []
    for sign in (1.0, -1.0):
        change = {"w": torch.tensor([sign * 3.0])}
        replies = [mod(message({"w": torch.zeros(1)}), context(), client(change)) for _ in range(draws)]
        scores.append(torch.tensor(np.array([float(one.content["arrays"].to_torch_state_dict()["w"]) for one in replies])))
    shown = shown_epsilon(scores[0], scores[1], options["delta"])
    assert options["epsilon"] < shown <= setting.readings(1)[0].proved
