"""Candidates are the batch if they give the whole update, and only then."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.whole_batch import WholeBatch
from dosimeter.network.head import find_head


def network(seed=0, classes=3, head=1.0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, classes)).eval()
    with torch.no_grad():
        model[-1].weight.mul_(head)
    return model


def batch(seed=0, count=4, classes=3):
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randint(classes, (count,), generator=rng))


PROTOCOLS = {
    "one gradient": {},
    "clipping": {"defenses": [dm.defense("clipping", max_norm=0.05)]},
    "three steps": {"training": dm.FedAvg(learning_rate=0.05, steps=3)},
    "momentum": {"training": dm.FedAvg(learning_rate=0.1, steps=2, momentum=0.9)},
}


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("head", [1.0, 1e-4])
def test_the_samples_are_found_among_mixtures(protocol, head):
    own = batch(1)
    exposure = dm.observe(network(1, head=head), own, **PROTOCOLS[protocol])
    mixtures = torch.stack([own.inputs[[0, 1]].mean(0), own.inputs[[1, 2]].mean(0), own.inputs[[0, 2, 3]].mean(0)])
    whole = WholeBatch(exposure)
    assert whole.is_possible()
    given = whole.find(torch.cat([mixtures, own.inputs]))
    assert given is not None
    assert given.places.tolist() == [3, 4, 5, 6]
    assert given.labels.tolist() == own.targets.tolist()


@pytest.mark.parametrize("training", [dm.FedAvg(learning_rate=0.5, steps=3), dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=2)])
def test_after_large_steps_and_in_mini_batches_the_likeliest_candidates_are_tried(training):
    own = batch(1)
    exposure = dm.observe(network(1), own, training=training)
    given = WholeBatch(exposure).find(torch.cat([own.inputs, own.inputs[[0, 1]].mean(0, keepdim=True)]))
    assert given is not None
    assert given.places.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("head", [1.0, 1e-4])
def test_a_mixture_in_the_place_of_a_sample_is_seen(protocol, head):
    own = batch(2)
    exposure = dm.observe(network(2, head=head), own, **PROTOCOLS[protocol])
    wrong = own.inputs.clone()
    wrong[0] = 0.99 * own.inputs[0] + 0.01 * own.inputs[1]
    assert WholeBatch(exposure).find(wrong) is None
    assert WholeBatch(exposure).find(own.inputs[:3]) is None  # fewer than are declared


@pytest.mark.parametrize(
    "protocol",
    [
        {"declare_batch_size": False},
        {"training": dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=2, shuffle=True)},  # in an order that the server does not know
        {"defenses": [dm.defense("gaussian_noise", std=1e-4)]},
        {"defenses": [dm.defense("clipping", max_norm=0.05, mode="layer")]},
    ],
)
def test_what_the_server_cannot_repeat_proves_nothing(protocol):
    assert not WholeBatch(dm.observe(network(), batch(), **protocol)).is_possible()


def test_a_wrong_size_is_refuted():
    own = batch(3, count=5)
    exposure = dm.observe(network(3), dm.Batch(own.inputs[:4], own.targets[:4]))
    claimed = dm.observe(network(3), own)
    assert WholeBatch(claimed).find(own.inputs) is not None
    object.__setattr__(exposure, "public", claimed.public)  # five samples declared, four sent
    assert WholeBatch(exposure).find(own.inputs) is None


def test_attacks_claim_all_samples_where_no_row_proves_one():
    """Three steps of two classes: rows agree on mixtures as well, and two steps are followed at most."""
    for seed in range(3):
        own = batch(seed, count=3, classes=2)
        attack = dm.attack("trap_weights", input_shape=(1, 8, 8), expected=3)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = nn.Sequential(nn.Flatten(), nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 2)).eval()
        exposure = dm.observe(attack.tamper(model), own, training=dm.FedAvg(learning_rate=0.5, steps=3))
        found = dm.reconstruct(exposure, attack)
        assert len(found.inputs) == 3
        assert torch.cdist(found.inputs.flatten(1), own.inputs.flatten(1)).amin(1).max() < 1e-3


def test_labels_and_candidates_are_sought_where_steps_overshoot():
    """A confident head moves past the labels, so that the errors at the logits add up to the other sign."""
    own, model = batch(5, count=3, classes=2), network(5, classes=2, head=5.0)
    exposure = dm.observe(model, own, training=dm.FedAvg(learning_rate=2.0, steps=3))
    mixture, whole = own.inputs[[0, 1]].mean(0, keepdim=True), WholeBatch(exposure)
    head = find_head(exposure)
    assert whole._errors(head, own.inputs).argmin(1).tolist() != own.targets.tolist()
    given = whole.find(torch.cat([mixture, own.inputs]))
    assert given is not None
    assert given.places.tolist() == [1, 2, 3]
    assert given.labels.tolist() == own.targets.tolist()
    assert whole.find(torch.cat([mixture, own.inputs[1:]])) is None


def test_more_orders_than_are_tried_prove_nothing():
    training = dm.FedAvg(learning_rate=0.05, epochs=2, mini_batch=2)
    assert WholeBatch(dm.observe(network(), batch(count=6), training=training)).is_possible()  # 90 orders
    assert not WholeBatch(dm.observe(network(), batch(count=8), training=training)).is_possible()
