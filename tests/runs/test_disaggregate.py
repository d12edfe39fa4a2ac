"""Rounds of secure aggregation come apart into the clients' own updates."""

import itertools

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.disaggregation import find_participation

CLIENTS, ROUNDS, INTERVAL = 8, 30, 10


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 30), nn.ReLU(), nn.Linear(30, 10)).eval()


def drawn(rounds: int, clients: int, seed: int, share: float = 0.4) -> torch.Tensor:
    """(rounds, clients) bool, with at least two clients in each round."""
    rng = torch.Generator().manual_seed(seed)
    there = torch.rand(rounds, clients, generator=rng)
    return (there < share) | (there.argsort(1).argsort(1) < 2)


def counts_of(there: torch.Tensor, interval: int = INTERVAL) -> torch.Tensor:
    return torch.stack([part.sum(0) for part in there.split(interval)])


@pytest.fixture
def clients(digits) -> list[dm.Batch]:
    images, labels = digits
    return [dm.Batch(images[10 * j : 10 * j + 1 + j % 3].clone(), labels[10 * j : 10 * j + 1 + j % 3].clone()) for j in range(CLIENTS)]


def rounds_of(there: torch.Tensor, clients: list[dm.Batch], **options) -> list[dm.Exposure]:
    return [
        dm.observe(network(), [clients[one] for one in row.nonzero().flatten().tolist()], seed=number, **options)
        for number, row in enumerate(there)
    ]


@pytest.mark.parametrize("training", [dm.FedSGD(), dm.FedAvg(learning_rate=0.05, steps=2)])
def test_every_client_is_found_with_its_rounds_its_update_and_its_samples(clients, training):
    there = drawn(ROUNDS, CLIENTS, 5)
    split = dm.disaggregate(rounds_of(there, clients, training=training), counts_of(there), INTERVAL)
    assert torch.equal(split.participation, there)
    assert split.unique.all()
    assert split.misfit < 1e-6
    for batch, alone in zip(clients, split.exposures, strict=True):
        own = training(network(), batch.inputs, batch.targets, dm.CrossEntropy())
        assert alone.public.batch_size == len(batch.inputs)
        assert not any(one.name == "secure_aggregation" for one in alone.public.defenses)
        for name, change in own.items():
            assert float((alone.update[name] - change).norm()) < 1e-4 * float(change.norm())


def test_the_methods_read_a_client_as_if_it_had_sent_alone(clients):
    there = drawn(ROUNDS, CLIENTS, 6)
    split = dm.disaggregate(rounds_of(there, clients), counts_of(there), INTERVAL)
    for batch, alone in zip(clients, split.exposures, strict=True):
        if len(batch.inputs) == 1:
            estimate = dm.recover_labels(alone, "idlg")
            assert estimate.labels.tolist() == batch.targets.tolist()
            assert not dm.recover_labels(alone, "subspace").certified  # the premise is none of the certificate's
            picture = alone.update["1.weight"] / alone.update["1.bias"][:, None]
            row = alone.update["1.bias"].abs().argmax()
            torch.testing.assert_close(picture[row], batch.inputs.flatten(), rtol=1e-2, atol=1e-2)


def test_the_programs_agree_with_trying_every_vector():
    rounds, clients, interval = 12, 4, 4
    for seed in range(4):
        there = drawn(rounds, clients, 20 + seed)
        updates = torch.randn(clients, 40, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        counts = counts_of(there, interval)
        found = find_participation(there.double() @ updates, counts, interval, 60.0)
        if int(torch.linalg.matrix_rank(there.double())) < clients:
            continue
        basis = torch.linalg.svd(there.double() @ updates)[0][:, clients:]
        every = torch.tensor(list(itertools.product((0.0, 1.0), repeat=rounds)), dtype=torch.float64)
        inside = every[(every @ basis).norm(dim=1) < 1e-6]
        for client in range(clients):
            fitting = inside[(counts[:, client] == counts_of(inside.T, interval).T).all(1)]
            assert (fitting == found.matrix[:, client]).all(1).any()
            assert bool(found.unique[client]) == (len(fitting) == 1)


def test_clients_with_the_same_counts_are_said_to_be_confusable():
    there = torch.tensor([[1, 0, 1], [0, 1, 1], [1, 1, 0], [1, 1, 1]]).bool()  # the first two take part three times each
    updates = torch.randn(3, 20, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = find_participation(there.double() @ updates, counts_of(there, 4), 4, 60.0)
    assert found.unique.tolist() == [False, False, False]


def test_updates_that_change_a_little_from_round_to_round(clients):
    there = drawn(ROUNDS, CLIENTS, 7)
    noise = dm.defense("gaussian_noise", std=1e-4)
    split = dm.disaggregate(rounds_of(there, clients, defenses=(noise,)), counts_of(there), INTERVAL)
    assert torch.equal(split.participation, there)
    assert 1e-5 < split.misfit < 1e-2
    assert [one.name for one in split.exposures[0].public.defenses] == ["unmodelled"]


def test_refusals(clients):
    there = drawn(ROUNDS, CLIENTS, 5)
    rounds, counts = rounds_of(there, clients), counts_of(there)
    with pytest.raises(dm.Refused, match="more rounds than clients: 8 clients, and 8 rounds"):
        dm.disaggregate(rounds[:8], counts_of(there[:8]), INTERVAL)
    with pytest.raises(ValueError, match=r"counts\[0\]: the counts add up to"):
        dm.disaggregate(rounds, counts + torch.eye(3, CLIENTS, dtype=torch.int64), INTERVAL)
    with pytest.raises(ValueError, match="a row for each of 3 intervals"):
        dm.disaggregate(rounds, counts[:2], INTERVAL)
    with pytest.raises(dm.Refused, match=r"rounds\[0\] is a single client's update"):
        dm.disaggregate([dm.observe(network(), clients[0]), *rounds[1:]], counts, INTERVAL)
    with pytest.raises(dm.Refused, match="its number of samples is not declared"):
        dm.disaggregate(rounds_of(there, clients, declare_batch_size=False), counts, INTERVAL)
    clipped = rounds_of(there, clients, defenses=(dm.defense("clipping", max_norm=0.01),))
    with pytest.raises(dm.Refused, match="multiplied the mean by an unknown factor"):
        dm.disaggregate(clipped, counts, INTERVAL)
    twins = [clients[0], clients[0], *clients[2:]]
    with pytest.raises(dm.Refused, match="show 7 independent updates of 8 clients"):
        dm.disaggregate(rounds_of(there, twins), counts, INTERVAL)
