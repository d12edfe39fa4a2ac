"""Error feedback: no part of an update is lost, only late."""

import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator
from dosimeter.runs.utility import Federation, measure_utility

COMPRESSORS = [{"compressor": "sign"}, {"compressor": "low_rank", "rank": 2}]


def updates(count: int) -> list[dict[str, torch.Tensor]]:
    rng = generator(3, "updates")
    shapes = {"weight": (8, 9), "bias": (8,)}
    return [{n: torch.randn(s, generator=rng, dtype=torch.float64) for n, s in shapes.items()} for _ in range(count)]


@pytest.mark.parametrize("options", COMPRESSORS)
def test_messages_and_the_last_error_add_up_to_the_updates(options):
    defense, memory, rng, given, sent = dm.defense("error_feedback", **options), {}, generator(0, "start"), updates(6), []
    for update in given:
        message, memory = defense.send(update, memory, rng)
        sent.append(message)
    for name in given[0]:
        total = sum(message[name] for message in sent) + memory[name]
        torch.testing.assert_close(total, sum(update[name] for update in given), rtol=0, atol=1e-12)
        assert name == "bias" or (sent[-1][name] - given[-1][name]).norm() > 0.3 * given[-1][name].norm()


@pytest.mark.parametrize("options", COMPRESSORS)
def test_the_first_message_is_plain_compression(options):
    (update,) = updates(1)
    plain = dm.defense(options["compressor"], **{k: v for k, v in options.items() if k == "rank"})
    first = dm.defense("error_feedback", **options).protect(update, generator(0, "start"))
    expected = plain.protect(update, generator(0, "start"))
    assert all(torch.equal(first[name], expected[name]) for name in update)


def test_a_matrix_of_that_rank_leaves_no_error():
    """A matrix of that rank has no error left, and one power iteration suffices."""
    rng = generator(4, "matrix")
    matrix = torch.randn(9, 2, generator=rng, dtype=torch.float64) @ torch.randn(2, 11, generator=rng, dtype=torch.float64)
    sent = dm.defense("error_feedback", compressor="low_rank", rank=2, rounds=3).protect({"a": matrix}, rng)["a"]
    torch.testing.assert_close(sent, matrix, rtol=0, atol=1e-10)


@pytest.mark.parametrize("options", COMPRESSORS)
def test_the_mean_message_comes_near_the_update(options):
    """The leak: what one message hides, the mean of many shows."""
    (update,) = updates(1)

    def missed(rounds: int) -> float:
        sent = dm.defense("error_feedback", rounds=rounds, averaged=True, **options).protect(update, generator(0, "start"))
        return float((sent["weight"] - update["weight"]).norm() / update["weight"].norm())

    assert missed(1) > 0.4
    assert missed(200) < 0.05


def test_the_papers_counterexample():
    """Section 3, counterexample 2: f(x) = ε |x₁ + x₂| + |x₁ − x₂|. Signs never leave the line x₁ + x₂ = 2; with error feedback they do."""
    defense, rng, slope = dm.defense("error_feedback"), generator(0, "unused"), 0.5

    def gradient(x: torch.Tensor) -> torch.Tensor:
        total, difference = torch.sign(x[0] + x[1]), torch.sign(x[0] - x[1])
        return torch.stack([slope * total + difference, slope * total - difference])

    plain = fed = torch.tensor([1.053, 0.947], dtype=torch.float64)
    memory: dict[str, torch.Tensor] = {}
    for _ in range(2000):
        plain = plain - 0.01 * dm.defense("sign").protect({"x": gradient(plain)}, rng)["x"]
        message, memory = defense.send({"x": gradient(fed)}, memory, rng)
        fed = fed - 0.01 * message["x"]
    assert float(plain.sum()) == pytest.approx(2, abs=1e-9)
    assert float(fed.abs().max()) < 0.1


def test_a_federated_training_keeps_a_memory_for_each_client(digits, monkeypatch):
    from dosimeter.defenses.error_feedback import ErrorFeedback
    from dosimeter.runs.measurement import AuditedClient, Protocol

    images, labels = digits
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    client = AuditedClient(
        model=model,
        batch=dm.Batch(images[:4], labels[:4]),
        pool=dm.Batch(images[:60], labels[:60]),
        held_out=dm.Batch(images[60:90], labels[60:90]),
    )
    seen, send = [], ErrorFeedback.send

    def watched(self, update, memory, rng):
        message, after = send(self, update, memory, rng)
        seen.append((memory, after))
        return message, after

    monkeypatch.setattr(ErrorFeedback, "send", watched)
    protocol = Protocol(defenses=(dm.defense("error_feedback"), dm.defense("clipping", max_norm=1.0)))
    measure_utility(client, protocol, Federation(clients=2, rounds=3, batch_size=4))
    rounds = seen[-6:]  # the earlier ones were timed
    assert [len(before) for before, _ in rounds] == [0, 0, 2, 2, 2, 2]
    for turn in range(2, 6):
        assert rounds[turn][0] is rounds[turn - 2][1]


def test_refusals():
    with pytest.raises(ValueError, match=r"defense\.compressor: expected one of 'sign', 'low_rank'"):
        dm.defense("error_feedback", compressor="pruning")
    with pytest.raises(ValueError, match=r"defense\.rounds: expected a positive int"):
        dm.defense("error_feedback", rounds=0)
