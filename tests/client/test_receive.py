"""A real client's update: names, buffers, frozen layers, precision, mode, steps and size, as a preflight table and as refusals."""

import copy
import dataclasses

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

import dosimeter as dm
from dosimeter.engines.matching.priors import batch_norm_prior


def quickstart_client(model, images, labels, *, batch_size=8, rate=0.01):
    """As Flower's PyTorch quickstart trains: SGD with momentum, a shuffled loader, and the whole state dict is sent."""
    client = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(client.parameters(), lr=rate, momentum=0.9)
    loader = DataLoader(TensorDataset(images, labels), batch_size=batch_size, shuffle=True, generator=torch.Generator().manual_seed(3))
    for inputs, targets in loader:
        optimizer.zero_grad()
        cross_entropy(client(inputs), targets).backward()
        optimizer.step()
    return {name: tensor.clone() for name, tensor in client.state_dict().items()}


TRAINING = dm.FedAvg(learning_rate=0.01, momentum=0.9, mini_batch=8)


@pytest.fixture
def sent(normed_classifier, digits):
    return quickstart_client(normed_classifier.train(), digits[0][:32], digits[1][:32])


def test_a_whole_state_dict_with_buffers_is_received(normed_classifier, sent):
    exposure = dm.receive(normed_classifier, sent, kind="weights", batch_size=32, training=TRAINING)
    assert list(exposure.update) == [name for name, _ in normed_classifier.named_parameters()]
    assert torch.equal(exposure.buffers["1.running_mean"], sent["1.running_mean"])
    assert int(exposure.buffers["1.num_batches_tracked"]) == 4
    assert int(normed_classifier[1].num_batches_tracked) == 0  # the caller's model stays as it was


@pytest.mark.parametrize("mini_batch", [4, 32])
def test_a_mini_batch_that_holds_all_samples_is_one_gradient(classifier, digits, mini_batch):
    """The quickstart's loader takes 32 samples a step. A client that has four makes one step."""
    sent = quickstart_client(classifier, digits[0][:4], digits[1][:4], batch_size=mini_batch)
    training = dm.FedAvg(learning_rate=0.01, momentum=0.9, mini_batch=mini_batch, shuffle=True)
    exposure = dm.receive(classifier, sent, kind="weights", batch_size=4, training=training)
    found = dm.recover_labels(exposure, "subspace")
    assert found.certified
    assert found.labels.tolist() == sorted(digits[1][:4].tolist())
    two = dm.receive(classifier, sent, kind="weights", batch_size=4, training=dataclasses.replace(training, epochs=2))
    assert not dm.recover_labels(two, "subspace").certified


def test_arrays_and_prefixed_names_are_received_too(normed_classifier, sent):
    arrays = {f"module.{name}": tensor.numpy() for name, tensor in sent.items()}
    facts = {"kind": "weights", "batch_size": 32, "training": TRAINING}
    one, other = dm.receive(normed_classifier, sent, **facts), dm.receive(normed_classifier, arrays, **facts)
    assert all(torch.equal(one.update[name], other.update[name]) for name in one.update)
    with pytest.raises(TypeError, match=r"update\.0\.weight: expected an array of numbers"):
        dm.receive(normed_classifier, sent | {"0.weight": np.array(["a"])}, **facts)


def test_buffers_of_a_difference_are_differences(normed_classifier, sent):
    difference = {name: tensor - normed_classifier.state_dict()[name] for name, tensor in sent.items()}
    exposure = dm.receive(normed_classifier, difference, kind="difference", batch_size=32, training=TRAINING)
    assert torch.allclose(exposure.buffers["1.running_var"], sent["1.running_var"])
    assert int(exposure.buffers["1.num_batches_tracked"]) == 4


def test_a_step_gives_the_statistics_of_the_batch_away(normed_classifier, digits):
    """The reference: after one step the running statistics and the momentum give the batch's own mean and variance."""
    model, images, labels = normed_classifier.train(), digits[0][:16], digits[1][:16]
    sent = quickstart_client(model, images, labels, batch_size=16)
    exposure = dm.receive(model, sent, kind="weights", batch_size=16, training=dm.FedAvg(learning_rate=0.01, steps=1))
    received = model[0](images).detach()
    prior = batch_norm_prior(exposure.model, weight=1.0, buffers=exposure.buffers)
    mean, variance, _ = prior.statistics["1"]
    assert torch.allclose(mean, received.mean((0, 2, 3)), atol=1e-5)
    assert torch.allclose(variance, received.var((0, 2, 3)), atol=1e-5)
    assert float(prior(images, {"1": received})) < 1e-4  # the prior is at home at the truth
    assert float(batch_norm_prior(exposure.model, weight=1.0)(images, {"1": received})) > 0.1  # the old statistics are not


def test_the_attacks_use_the_statistics(normed_classifier, sent):
    exposure = dm.receive(normed_classifier, sent, kind="weights", batch_size=32, training=TRAINING)
    for name in ("gradinversion", "stepwise"):
        found = dm.reconstruct(exposure, name, labels=torch.zeros(32, dtype=torch.int64), steps=2)
        prior = next(prior for prior in found.recipe.priors if hasattr(prior, "statistics"))
        assert not torch.allclose(prior.statistics["1"][0], torch.zeros(4))  # the model that was sent has zeros


def refusal(model, update, **facts):
    with pytest.raises(ValueError) as caught:
        dm.receive(model, update, **{"kind": "weights", "batch_size": 32, "training": TRAINING} | facts)
    assert not dm.preflight(model, update, **{"kind": "weights", "batch_size": 32, "training": TRAINING} | facts).fits
    return str(caught.value)


def test_what_does_not_fit_is_refused(normed_classifier, sent):
    assert "update: the model has no parameter 'head.weight'" in refusal(normed_classifier, sent | {"head.weight": torch.ones(2)})
    assert "update.1.running_var: expected shape (4,)" in refusal(normed_classifier, sent | {"1.running_var": torch.ones(3)})
    assert "finite real numbers" in refusal(normed_classifier, sent | {"1.running_var": torch.full((4,), torch.nan)})
    assert "declare steps=4" in refusal(normed_classifier, sent, training=dm.FedAvg(learning_rate=0.01, steps=2))
    assert "needs the client's learning rate" in refusal(normed_classifier, sent, training=dm.FedSGD())
    assert "pass batch_size" in refusal(normed_classifier, sent, batch_size=None)
    with pytest.raises(ValueError, match="kind: expected one of"):
        dm.receive(normed_classifier, sent, kind="weight")
    assert "in train mode; call model.train()" in refusal(normed_classifier.eval(), sent)


def test_a_client_in_eval_mode_is_told_by_the_counters(normed_classifier, digits):
    model = normed_classifier.train()
    before = copy.deepcopy(model)
    sent = quickstart_client(before, digits[0][:8], digits[1][:8])
    frozen = sent | {name: tensor for name, tensor in model.state_dict().items() if name.startswith("1.") and "weight" not in name}
    assert "in eval mode; call model.eval()" in refusal(model, frozen, training=dm.FedAvg(learning_rate=0.01, steps=1))


def test_a_learning_rate_that_cannot_explain_the_update_is_refused(classifier, digits):
    """The head's bias cannot move further than its steps: half of what the client did is proved too little."""
    sent = quickstart_client(classifier, digits[0][:8], torch.zeros(8, dtype=torch.int64), rate=0.1)
    said = refusal(classifier.train(), sent, training=dm.FedAvg(learning_rate=0.005, steps=1))
    assert "no data explain it; check the learning rate and the steps" in said
    assert dm.receive(classifier, sent, kind="weights", training=dm.FedAvg(learning_rate=0.1, steps=1)).update


def local_client(model, images, labels, make_optimizer, accumulate=1, max_norm=None):
    """The weights after two epochs over mini-batches of four."""
    client = copy.deepcopy(model)
    optimizer = make_optimizer(client.parameters())
    for _ in range(2):
        for group in torch.arange(len(images)).split(4 * accumulate):
            optimizer.zero_grad()
            for piece in group.split(4):
                (cross_entropy(client(images[piece]), labels[piece]) / -(-len(group) // 4)).backward()
            if max_norm is not None:
                torch.nn.utils.clip_grad_norm_(client.parameters(), max_norm)
            optimizer.step()
    return client.state_dict()


def test_batch_norm_counts_mini_batches_and_not_steps(normed_classifier, digits):
    """A client that accumulates gradients has fewer steps than batches."""
    model, (images, labels) = normed_classifier.train(), (digits[0][:12], digits[1][:12])
    sent = local_client(model, images, labels, lambda weights: torch.optim.SGD(weights, lr=0.05), accumulate=2)
    training = dm.FedAvg(learning_rate=0.05, epochs=2, mini_batch=4, accumulate=2)
    facts = {"kind": "weights", "input_shape": (1, 8, 8), "batch_size": 12}
    assert dm.receive(model, sent, training=training, **facts).update
    with pytest.raises(ValueError, match="counted 6 batches, and the declared training has 12 in 8 steps; check its epochs"):
        dm.receive(model, sent, training=dataclasses.replace(training, epochs=4), **facts)
    unknown = facts | {"batch_size": None, "training": dataclasses.replace(training, steps=4)}
    assert "nothing declared tells how many a step takes" in str(dm.preflight(model, sent, **unknown))


@pytest.mark.parametrize("optimizer", ["Adam", "AdamW", "RMSprop", "Adagrad"])
def test_steps_of_known_size_move_no_weight_further(classifier, digits, optimizer):
    sent = local_client(
        classifier.train(), digits[0][:12], digits[1][:12], lambda weights: getattr(torch.optim, optimizer)(weights, lr=0.01)
    )
    training = dm.FedAvg(learning_rate=0.01, epochs=2, mini_batch=4, optimizer=optimizer)
    facts = {"kind": "weights", "input_shape": (1, 8, 8), "batch_size": 12}
    assert dm.receive(classifier, sent, training=training, **facts).update
    with pytest.raises(ValueError, match=r"an entry moved by .*, and the declared optimiser allows .*: no data explain it"):
        dm.receive(classifier, sent, training=dataclasses.replace(training, learning_rate=5e-4), **facts)


def test_clipped_steps_move_the_weights_no_further(classifier, digits):
    sent = local_client(
        classifier.train(), digits[0][:12], digits[1][:12], lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), max_norm=0.3
    )
    training = dm.FedAvg(learning_rate=0.1, momentum=0.9, epochs=2, mini_batch=4, max_norm=0.3)
    facts = {"kind": "weights", "input_shape": (1, 8, 8), "batch_size": 12}
    assert dm.receive(classifier, sent, training=training, **facts).update
    with pytest.raises(ValueError, match=r"the weights moved by a norm of .*, and clipped steps allow .*; check max_norm"):
        dm.receive(classifier, sent, training=dataclasses.replace(training, max_norm=0.05), **facts)


def test_a_summed_loss_is_refused_where_it_shows(classifier, digits):
    client = copy.deepcopy(classifier)
    cross_entropy(client(digits[0][:32]), torch.zeros(32, dtype=torch.int64), reduction="sum").backward()
    gradient = {name: parameter.grad for name, parameter in client.named_parameters()}
    with pytest.raises(ValueError, match="check the units, a mean over the batch"):
        dm.receive(classifier, gradient, input_shape=(1, 8, 8))


def test_frozen_layers_are_taken_as_such(classifier, digits):
    client = copy.deepcopy(classifier)
    client[0].requires_grad_(False)
    sent = quickstart_client(client, digits[0][:8], digits[1][:8])
    facts = {"kind": "weights", "training": dm.FedAvg(learning_rate=0.01, steps=1), "input_shape": (1, 8, 8)}
    table = dm.preflight(classifier, sent, **facts)
    assert table.fits
    assert "no entry moved in 0.weight, 0.bias" in str(table)
    assert "0.weight" not in dm.receive(classifier, sent, **facts).update
    classifier[5].requires_grad_(False)
    with pytest.raises(ValueError, match=r"5\.weight, 5\.bias moved, and the model has it frozen"):
        dm.receive(classifier, sent, **facts)


def test_shared_weights_are_received_once(digits):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.head(self.second(self.first(x.flatten(1)).relu()).relu())

    torch.manual_seed(0)
    model = Tied()
    sent = quickstart_client(model, digits[0][:8], digits[1][:8])
    exposure = dm.receive(model, sent, kind="weights", training=dm.FedAvg(learning_rate=0.01, steps=1), input_shape=(1, 8, 8))
    assert "first.weight" in exposure.update
    assert "second.weight" not in exposure.update


def test_the_table_names_every_topic(normed_classifier, sent):
    table = dm.preflight(normed_classifier, sent, kind="weights", batch_size=32, training=TRAINING)
    assert table.fits
    assert [line.topic for line in table.lines] == ["tensors", "dtype", "kind", "mode", "training"]
    assert "4 steps, as batch norm's counters say" in str(table)
    halved = {name: tensor.half() if tensor.is_floating_point() else tensor for name, tensor in sent.items() if name != "0.bias"}
    noted = str(dm.preflight(normed_classifier, halved, kind="weights", batch_size=32, training=TRAINING))
    assert "not sent: 0.bias" in noted
    assert "sent in float16, while the model has float32" in noted


def test_nothing_false_is_proved_of_a_quickstart_client(normed_classifier, digits, sent):
    """Labels, features and maps of a client with momentum and a shuffled loader: whatever is certified is true."""
    batch = dm.Batch(digits[0][:32], digits[1][:32])
    exposure = dm.receive(normed_classifier, sent, kind="weights", batch_size=32, training=TRAINING)
    labels = dm.recover_labels(exposure, "zlg")
    assert float(dm.score(labels, batch)["insacc"]) > 0.5
    for found in (labels, dm.recover_labels(exposure, "subspace"), dm.recover_features(exposure, "subspace")):
        assert not bool(torch.as_tensor(found.certified).any())


@pytest.mark.parametrize("wrapped", ["whole", "part"])
def test_names_that_wrappers_changed_are_found(classifier, digits, wrapped):
    """The law: torch.compile, DataParallel and Opacus change names, of a model or of a part, and never the exposure."""
    sent = quickstart_client(classifier, digits[0][:4], digits[1][:4], batch_size=4)
    facts = {"kind": "weights", "batch_size": 4, "training": dm.FedAvg(learning_rate=0.01, momentum=0.9, steps=1)}
    plain = dm.receive(classifier, sent, **facts).update
    whole, part = "_orig_mod.module.{}", "{}._orig_mod._module.{}"
    renamed = {(whole.format(name) if wrapped == "whole" else part.format(*name.split(".", 1))): tensor for name, tensor in sent.items()}
    found = dm.receive(classifier, renamed, **facts).update
    assert list(found) == list(plain)
    assert all(torch.equal(tensor, plain[name]) for name, tensor in found.items())
    with pytest.raises(ValueError, match="has no parameter 'nowhere'"):
        dm.receive(classifier, renamed | {"nowhere": torch.zeros(1)}, **facts)
