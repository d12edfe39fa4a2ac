"""Laws of every active attack: the caller's model stays as it is, and protocols leave it what its docstring says."""

import copy

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.interfaces import ActiveAttack
from dosimeter.models.loading import load_model
from dosimeter.registry import ATTACKS

OPTIONS = {
    "fishing": ({"target": 2}, {"target": 2, "feature": 1, "cutoff": 0.1}),
    "gradfilt": ({"targets": (2,)},),
    "gradfilt_imprint": ({"targets": (2, 5), "expected": 20},),
    "imprint": ({"bins": 90}, {"bins": 90, "sparse": True}),
}
ACTIVE = [name for name in ATTACKS.names() if issubclass(ATTACKS.entry(name, "attack"), ActiveAttack)]
VARIANTS = [(name, options) for name in ACTIVE for options in OPTIONS.get(name, ({},))]


def linear_first(bias: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 60, bias=bias), nn.ReLU(), nn.Linear(60, 10, bias=bias))


MODELS = {
    "convolutions with batch norm": lambda: load_model("convnet", {"size": 16, "width": 2}, None, 3),
    "linear first": lambda: linear_first(True),
    "linear first without bias": lambda: linear_first(False),
}


def test_all_of_them_are_here() -> None:
    assert {"gradfilt", "gradfilt_imprint", "imprint", "trap_weights"} <= set(ACTIVE)


@pytest.mark.parametrize("kind", list(MODELS))
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_tampering_never_touches_the_callers_model(name, options, training, kind) -> None:
    model = MODELS[kind]().train(training)
    state, modules = copy.deepcopy(model.state_dict()), dict(model.named_modules())
    parameters = {key: id(value) for key, value in model.named_parameters()}
    rigged = dm.attack(name, input_shape=(3, 16, 16), **options).tamper(model)
    with torch.no_grad():
        for value in [*rigged.parameters(), *rigged.buffers()]:  # whatever is shared would show up in the caller's model
            value.add_(1)
    rigged.train(not training)
    assert model.training is training
    assert dict(model.named_modules()) == modules
    assert {key: id(value) for key, value in model.named_parameters()} == parameters
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(value.grad is None and value.requires_grad for value in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.fixture
def crowd() -> dm.Batch:
    rng = torch.Generator().manual_seed(6)
    inputs = nn.functional.interpolate(torch.rand(18, 3, 5, 5, generator=rng), (16, 16), mode="bilinear")
    return dm.Batch((inputs * 255).round() / 255, torch.arange(18) % 6)


def right(found: dm.Reconstruction, batch: dm.Batch) -> int:
    """How many claims are samples of the batch; all must be."""
    error = torch.cdist(found.inputs.double().flatten(1), batch.inputs.double().flatten(1)).min(1).values / 768**0.5
    assert (error < 1e-2).all()
    return len(found.inputs)


@pytest.mark.parametrize(
    ("name", "options"), [("gradfilt_imprint", {"targets": (2,), "expected": 20}), ("imprint", {}), ("trap_weights", {})]
)
@pytest.mark.parametrize("clients", [2, 6])
def test_secure_aggregation_leaves_the_samples_of_all_clients(name, options, clients, crowd) -> None:
    model = load_model("small_cnn", {"size": 16, "width": 4}, None, 3)
    attack = dm.attack(name, input_shape=(3, 16, 16), **options)
    rigged, secure = attack.tamper(model), dm.defense("secure_aggregation", clients=clients)
    alone = dm.reconstruct(dm.observe(rigged, crowd), attack)
    together = dm.reconstruct(dm.observe(rigged, crowd, defenses=(secure,)), attack)
    assert right(together, crowd) == right(alone, crowd) >= (3 if name == "gradfilt_imprint" else 9)


@pytest.mark.parametrize(("name", "options"), [("gradfilt_imprint", {"targets": (2,), "expected": 20}), ("imprint", {})])
def test_local_steps_are_said_to_move_the_inserted_layer(name, options, crowd) -> None:
    model = load_model("small_cnn", {"size": 16, "width": 4}, None, 3)
    attack = dm.attack(name, input_shape=(3, 16, 16), **options)
    exposure = dm.observe(attack.tamper(model), crowd, training=dm.FedAvg(learning_rate=0.05, mini_batch=6))
    found = dm.reconstruct(exposure, attack)
    assert right(found, crowd) < len(crowd.inputs)
    assert "local steps move the layer" in found.message


def test_local_steps_are_said_to_move_the_filter(crowd) -> None:
    model = load_model("small_cnn", {"size": 16, "width": 4}, None, 3)
    rigged = dm.attack("gradfilt", targets=(2,), input_shape=(3, 16, 16)).tamper(model)
    estimate = dm.recover_labels(dm.observe(rigged, crowd, training=dm.FedAvg(learning_rate=1e-3, mini_batch=6)), "gradfilt")
    assert torch.equal(estimate.counts, torch.bincount(crowd.targets, minlength=10))  # small steps move it little
    assert "local steps move the filter" in estimate.message
    assert not estimate.certified


@pytest.mark.parametrize("name", ["imprint", "trap_weights"])
def test_another_round_sends_another_model_and_finds_others(name, crowd) -> None:
    model = load_model("small_cnn", {"size": 16, "width": 4}, None, 3)
    seen: list[torch.Tensor] = []
    few = {"bins": 24} if name == "imprint" else {"rows": 40}
    for number in range(3):
        attack = dm.attack(name, input_shape=(3, 16, 16), round=number, **few)
        found = dm.reconstruct(dm.observe(attack.tamper(model), crowd), attack)
        nearest = torch.cdist(found.inputs.double().flatten(1), crowd.inputs.double().flatten(1)).argmin(1) if len(found.inputs) else None
        seen.append(torch.zeros(0, dtype=torch.int64) if nearest is None else nearest.unique())
    assert len(torch.cat(seen).unique()) > max(len(one) for one in seen)
