"""Secure aggregation of real updates: the mean of captures is the update of all clients' samples, and what it proves is true."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

import dosimeter as dm

STEP = dm.FedAvg(learning_rate=0.1, steps=1)


def sent_by(model, batch, name, **facts):
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), lr=0.1)
    cross_entropy(client(batch.inputs), batch.targets).backward()
    optimizer.step()
    return dm.Capture(update=client.state_dict(), kind="weights", training=STEP, batch_size=len(batch.inputs), client=name, **facts)


@pytest.fixture
def batches(batch):
    return [dm.Batch(batch.inputs[:2], batch.targets[:2]), dm.Batch(batch.inputs[2:5], batch.targets[2:5])]


def test_a_list_of_batches_is_the_weighted_mean_of_their_updates(classifier, batches):
    together = dm.observe(classifier, batches)
    each = [dm.observe(classifier, one).update for one in batches]
    for name, change in together.update.items():
        assert torch.allclose(change, 0.4 * each[0][name] + 0.6 * each[1][name], atol=1e-6)
    assert together.public.batch_size == 5
    assert together.public.training.sizes == (2, 3)
    with pytest.raises(TypeError, match="batch: expected a Batch, or a list of them"):
        dm.observe(classifier, [1, 2])
    with pytest.raises(ValueError, match="samples of one shape from every client"):
        dm.observe(classifier, [batches[0], dm.Batch(batches[1].inputs[:, :, :4], batches[1].targets)])


def test_captures_add_up_to_what_the_server_sees(classifier, batches):
    captures = [sent_by(classifier, one, name) for one, name in zip(batches, "ab")]
    mean = dm.aggregate(captures)
    assert (mean.clients, mean.sizes, mean.batch_size, mean.client) == (2, (2, 3), 5, "a+b")
    received = mean.receive(classifier, input_shape=(1, 8, 8))
    simulated = dm.observe(classifier, batches, training=STEP)
    for name, change in simulated.update.items():
        assert torch.allclose(received.update[name], change, atol=1e-5)
    assert received.public.training == simulated.public.training


def test_samples_of_the_mean_are_proved_and_true(classifier, batches):
    """One step of every client: the mean is one gradient of all samples, and says nothing of whose they are."""
    truth = dm.Batch(torch.cat([one.inputs for one in batches]), torch.cat([one.targets for one in batches]))
    exposure = dm.aggregate([sent_by(classifier, one, name) for one, name in zip(batches, "ab")]).receive(classifier, input_shape=(1, 8, 8))
    labels, features = dm.recover_labels(exposure, "subspace"), dm.recover_features(exposure, "subspace")
    assert labels.certified
    assert labels.labels.tolist() == sorted(truth.targets.tolist())
    assert "the batch is that of 2 clients together" in labels.premises
    assert int(features.certified.sum()) == 5
    assert dm.score(features, truth, exposure=exposure).details["false_certificates"] == 0


def test_batch_norm_of_each_client_forbids_the_proof(normed_classifier, batches):
    exposure = dm.observe(normed_classifier.train(), batches)
    assert not dm.recover_labels(exposure, "subspace").certified


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"batch_size": None}, "expected the batch_size of every client"),
        ({"round": 3}, "expected one round for all clients"),
        ({"kind": "gradient"}, "expected one kind"),
        ({"training": dm.FedAvg(learning_rate=0.1, mini_batch=2)}, "expected one training"),
        ({"clients": 2}, "each of one client alone"),
    ],
)
def test_captures_that_do_not_add_up_are_refused(classifier, batches, change, sentence):
    one, other = (sent_by(classifier, batch, "x") for batch in batches)
    with pytest.raises(ValueError, match=sentence):
        dm.aggregate([one, replace(other, **change)])
    with pytest.raises(ValueError, match="at least two clients"):
        dm.aggregate([one])


def test_different_numbers_of_steps_have_no_common_unit(classifier, batches):
    uneven = dm.FedAvg(learning_rate=0.1, mini_batch=2)
    with pytest.raises(ValueError, match=r"clients took \[1, 2\] steps"):
        dm.aggregate([replace(sent_by(classifier, one, "x"), training=uneven) for one in batches])


def test_what_clients_did_alone_is_no_defense_of_the_mean():
    """Each client clips by a factor of its own, so that the mean is no clipped gradient."""
    clipping = dm.defense("clipping", max_norm=0.1)
    facts = {"kind": "gradient", "training": dm.FedSGD(), "batch_size": 2}
    clipped = [dm.Capture(update={"w": torch.ones(3)}, defenses=(clipping,), client=name, **facts) for name in "ab"]
    assert [defense.name for defense in dm.aggregate(clipped).defenses] == ["clipping", "unmodelled"]
    setting = dm.privacy("flower_local_dp", clipping_norm=1.0, sensitivity=2.0, epsilon=0.5, delta=1e-5)
    noisy = dm.aggregate([dm.Capture(update={"w": torch.ones(3)}, privacy=setting, client=name, **facts) for name in "ab"])
    assert ([defense.name for defense in noisy.defenses], noisy.privacy) == (["unmodelled"], None)
