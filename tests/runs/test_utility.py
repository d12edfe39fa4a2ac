import copy
import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.privacy import guarantees
from dosimeter.models.loading import ModelConfig
from dosimeter.runs.audited_client import DataConfig, measure_accuracy, prepare
from dosimeter.runs.measurement import AuditedClient, Protocol
from dosimeter.runs.utility import Federation, measure_utility, update_bytes
from dosimeter.types import Outcome, Refused

SHORT = Federation(clients=3, rounds=4, batch_size=8)


@pytest.fixture(scope="module")
def subject() -> AuditedClient:
    return prepare(ModelConfig(options={"activation": "relu"}), DataConfig(name="digits", batch_size=2), seed=5)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gaussian_noise", {"std": 0}),
        ("clipping", {"max_norm": math.inf}),
        ("pruning", {"ratio": 0}),
        ("quantisation", {"bits": 32}),
        ("random_labels", {"epsilon": math.inf}),
        ("secure_aggregation", {"clients": 1}),
    ],
)
def test_a_defense_that_does_nothing_costs_nothing(subject, name, options):
    plain = measure_utility(subject, Protocol(seed=3), SHORT)
    idle = measure_utility(subject, Protocol(seed=3, defenses=(dm.defense(name, **options),)), SHORT)
    assert (idle.accuracy, idle.update_bytes, idle.guarantees) == (plain.accuracy, plain.update_bytes, ())
    assert plain.update_bytes == plain.dense_bytes == 4 * sum(p.numel() for p in subject.model.parameters())


def test_it_is_federated_sgd(subject):
    """One client whose batch is its whole shard is plain gradient descent, written out here."""
    pool = dm.Batch(subject.pool.inputs[:40], subject.pool.targets[:40])
    small = AuditedClient(model=subject.model, batch=subject.batch, pool=pool, held_out=subject.held_out)
    federation = Federation(clients=1, rounds=15, batch_size=40, learning_rate=0.3, server="sgd")
    found = measure_utility(small, Protocol(), federation)
    model, accuracies = copy.deepcopy(subject.model), []
    for _ in range(15):
        model.zero_grad()
        nn.functional.cross_entropy(model(pool.inputs), pool.targets).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.3 * parameter.grad
        accuracies.append(measure_accuracy(model, subject.held_out))
    assert found.accuracy == pytest.approx(sum(accuracies[-5:]) / 5, abs=0.006)
    assert found.accuracy > measure_accuracy(subject.model, subject.held_out) + 0.2


def test_it_learns_and_noise_costs_accuracy(subject):
    federation = Federation(rounds=30)
    plain = measure_utility(subject, Protocol(seed=11), federation)
    drowned = measure_utility(subject, Protocol(seed=11, defenses=(dm.defense("gaussian_noise", std=10.0),)), federation)
    assert plain.accuracy > 0.8
    assert drowned.accuracy < 0.5
    again = measure_utility(subject, Protocol(seed=11), federation)
    assert (again.accuracy, again.update_bytes) == (plain.accuracy, plain.update_bytes)


def test_epsilon_is_that_of_the_accountant(subject):
    private = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.1)
    found = measure_utility(subject, Protocol(defenses=(private,)), SHORT)
    shard = len(subject.pool.inputs) // 3
    (expected,) = guarantees((private,), sample_rate=8 / shard, steps=4, delta=1e-5)
    assert found.guarantees == (expected,)
    assert 0 < expected.epsilon < math.inf


def test_bytes_of_the_encodings():
    matrix = torch.arange(1, 61, dtype=torch.float32).view(6, 10)
    sparse = torch.zeros(1000)
    sparse[:3] = 1.0
    half = torch.zeros(64)
    half[:30] = 1.0
    assert update_bytes({"w": matrix}) == 240
    pruning = [dm.defense("pruning", ratio=0.5)]
    assert update_bytes({"w": sparse}, pruning) == 3 * (4 + 4)  # values and positions
    assert update_bytes({"w": half}, pruning) == 30 * 4 + 8  # values and one bit an entry
    assert update_bytes({"w": matrix}, pruning) == 240  # no zeros, no gain
    assert update_bytes({"w": half}) == 256  # zeros that nobody put in are sent
    assert update_bytes({"w": matrix}, [dm.defense("quantisation", bits=4)]) == 30 + 4
    assert update_bytes({"w": matrix}, [dm.defense("sign")]) == math.ceil(60 / 8 + 4)
    assert update_bytes({"w": matrix}, [dm.defense("low_rank", rank=2)]) == 4 * 2 * 16
    assert update_bytes({"w": matrix, "b": torch.ones(5)}, [dm.defense("low_rank", rank=2)]) == 4 * 2 * 16 + 20
    assert update_bytes({}) == 0


def test_what_follows_can_undo_an_encoding():
    matrix = {"w": torch.arange(1, 61, dtype=torch.float32).view(6, 10)}
    four, noise, rank = dm.defense("quantisation", bits=4), dm.defense("gaussian_noise", std=0.1), dm.defense("low_rank", rank=2)
    assert update_bytes(matrix, [noise, four]) == 34
    assert update_bytes(matrix, [four, noise]) == 240
    assert update_bytes(matrix, [rank, dm.defense("clipping", max_norm=1.0)]) == 128
    assert update_bytes(matrix, [rank, dm.defense("pruning", ratio=0.1)]) == 240


def test_a_withheld_head_stays_and_the_caller_keeps_its_model(subject):
    before = {name: value.clone() for name, value in subject.model.state_dict().items()}
    found = measure_utility(subject, Protocol(defenses=(dm.defense("head_withheld"),)), SHORT)
    head = subject.model.get_submodule("fc")
    assert found.update_bytes == found.dense_bytes - 4 * sum(p.numel() for p in head.parameters())
    assert all(torch.equal(before[name], value) for name, value in subject.model.state_dict().items())


def test_batch_norm_in_train_mode_is_judged_with_statistics_of_its_own(subject):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)).train()
    normed = AuditedClient(model=model, batch=subject.batch, pool=subject.pool, held_out=subject.held_out)
    assert measure_utility(normed, Protocol(), Federation(rounds=25)).accuracy > 0.7
    assert bool((model[1].running_mean == 0).all())


def test_divergence_is_an_outcome(subject):
    found = measure_utility(subject, Protocol(), Federation(clients=2, rounds=30, batch_size=8, learning_rate=1e20, server="sgd"))
    assert found.outcome is Outcome.DIVERGED
    assert "NaN or infinite" in found.message


def test_refusals(subject):
    bare = AuditedClient(model=subject.model, batch=subject.batch)
    with pytest.raises(Refused, match="utility needs samples to train on"):
        measure_utility(bare, Protocol(), SHORT)
    with pytest.raises(Refused, match="3 clients need a sample each"):
        measure_utility(
            AuditedClient(model=subject.model, batch=subject.batch, pool=subject.batch, held_out=subject.batch), Protocol(), SHORT
        )
    with pytest.raises(Refused, match="dropout acts in train mode only"):
        measure_utility(subject, Protocol(defenses=(dm.defense("dropout"),)), SHORT)
    with pytest.raises(ValueError, match="rounds: expected a positive int, got 0"):
        Federation(rounds=0)
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match=r"delta: expected a number in \(0, 1\), got"):
            Federation(delta=delta)
