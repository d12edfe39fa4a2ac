import pytest
import torch
from torch import nn

import dosimeter as dm


def _observed(model, batch, clients, **options):
    return dm.observe(model, batch, defenses=(dm.defense("secure_aggregation", clients=clients),), **options)


def test_with_fedsgd_the_mean_is_the_gradient_of_the_whole_batch(classifier, batch):
    plain = dm.observe(classifier, batch).update
    for clients in (2, 4, 6):  # four clients hold 2, 2, 1 and 1 of six samples
        sent = _observed(classifier, batch, clients).update
        for name, change in plain.items():
            assert torch.allclose(sent[name], change, atol=1e-6)


def test_with_local_steps_it_is_the_weighted_mean_of_the_clients_updates(classifier, batch):
    training = dm.FedAvg(learning_rate=0.5, steps=4)
    shares = [dm.Batch(batch.inputs[piece], batch.targets[piece]) for piece in (slice(0, 2), slice(2, 4), slice(4, 5), slice(5, 6))]
    each = [dm.observe(classifier, share, training=training).update for share in shares]
    sent = _observed(classifier, batch, 4, training=training).update
    for name, change in sent.items():
        expected = sum(update[name] * weight / 6 for update, weight in zip(each, (2, 2, 1, 1)))
        assert torch.allclose(change, expected, atol=1e-6)
    alone = dm.observe(classifier, batch, training=training).update
    assert not torch.allclose(sent["5.weight"], alone["5.weight"], atol=1e-4)


def test_each_client_has_its_own_batch_norm_statistics(normed_classifier, batch):
    shares = [dm.observe(normed_classifier, dm.Batch(batch.inputs[i : i + 3], batch.targets[i : i + 3])).update for i in (0, 3)]
    sent = _observed(normed_classifier, batch, 2).update
    for name, change in sent.items():
        assert torch.allclose(change, (shares[0][name] + shares[1][name]) / 2, atol=1e-6)


class _Counting(nn.Module):
    """A layer that counts its passes in a buffer and lets the count into its output."""

    def __init__(self):
        super().__init__()
        self.register_buffer("passes", torch.ones(()))

    def forward(self, inputs):
        self.passes.add_(1)
        return inputs * self.passes


def test_each_client_starts_from_the_buffers_that_were_sent(batch):
    model = nn.Sequential(nn.Flatten(), _Counting(), nn.Linear(64, 10))
    sent = _observed(model, batch, 3).update
    shares = [dm.observe(model, dm.Batch(batch.inputs[i : i + 2], batch.targets[i : i + 2])).update for i in (0, 2, 4)]
    assert torch.allclose(sent["2.weight"], torch.stack([share["2.weight"] for share in shares]).mean(0), atol=1e-5)


def test_the_server_can_replay_the_mean(classifier, batch):
    exposure = _observed(classifier, batch, 3, training=dm.FedAvg(steps=2))
    replayed = exposure.public.training(exposure.model, batch.inputs, batch.targets, exposure.public.loss)
    assert all(torch.equal(replayed[name], exposure.update[name]) for name in exposure.update)


def test_more_clients_than_samples_are_refused(classifier, batch):
    with pytest.raises(dm.Refused, match="needs a sample for each"):
        _observed(classifier, batch, 7)


def test_it_is_refused_after_a_defense_of_the_update(classifier, batch):
    defenses = (dm.defense("clipping", max_norm=1.0), dm.defense("secure_aggregation", clients=2))
    with pytest.raises(dm.Refused, match="must be listed before"):
        dm.observe(classifier, batch, defenses=defenses)
