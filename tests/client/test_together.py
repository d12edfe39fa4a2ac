"""Clients side by side send what they send one by one."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client import together
from dosimeter.client.together import clients_at_once, train_each
from dosimeter.models.loading import load_model

CLIENTS, SIZE = 5, 6


class Unreached(nn.Module):
    """A network with a layer that the loss does not reach."""

    def __init__(self):
        super().__init__()
        self.head, self.idle = nn.Linear(48, 3), nn.Linear(4, 4)

    def forward(self, inputs):
        return self.head(inputs.flatten(1))


def network(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        body = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten()]
        networks = {
            "plain": nn.Sequential(*body, nn.Linear(16, 3)),
            "group_norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
            "batch_norm": nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)),
            "dropout": nn.Sequential(*body, nn.Dropout(0.5), nn.Linear(16, 3)),
            "unreached": Unreached(),
        }
        return networks[name]


def updates_of(model, training, stack_bytes=together.STACK_BYTES):
    """The updates of five clients, and in how many stacks they came."""
    rng = torch.Generator().manual_seed(3)
    samples = dm.Batch(torch.rand(20, 3, 4, 4, generator=rng), torch.arange(20) % 3)
    chosen = torch.randint(20, (CLIENTS, SIZE), generator=rng)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(together, "STACK_BYTES", stack_bytes)
        stacks = list(train_each(training, model, samples, chosen, dm.CrossEntropy(), range(10, 10 + CLIENTS)))
    return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}, len(stacks)


def assert_same(model, training, stacks):
    ours, number = updates_of(model, training)
    alone, every = updates_of(model, training, stack_bytes=0)
    assert (number, every) == (stacks, CLIENTS)
    for name, change in alone.items():
        torch.testing.assert_close(ours[name], change, rtol=1e-3, atol=2e-5 * float(change.abs().max()) + 1e-12)
        assert float((change[0] - change[1]).abs().max()) > 0 or not change.any()


OPTIMISERS = {
    "sgd": {},
    "momentum": {"momentum": 0.9, "weight_decay": 0.1},
    "adam": {"optimizer": "adam", "learning_rate": 0.001},
    "adamw": {"optimizer": "adamw", "learning_rate": 0.001, "weight_decay": 0.1},
    "rmsprop": {"optimizer": "rmsprop", "learning_rate": 0.001},
    "proximal": {"proximal": 0.5, "frozen": ("0",)},
}


@pytest.mark.parametrize("name", OPTIMISERS)
@pytest.mark.parametrize("shape", [{"mini_batch": 4}, {"mini_batch": 2, "accumulate": 2}, {}], ids=["ragged", "accumulated", "whole"])
def test_every_optimiser_in_shuffled_epochs(name, shape):
    training = dm.FedAvg(**{"learning_rate": 0.1, "epochs": 3, "shuffle": True} | shape | OPTIMISERS[name])
    assert_same(network("plain"), training, stacks=1)


def test_a_gradient_and_a_given_number_of_steps():
    assert_same(network("plain"), dm.FedSGD(), stacks=1)
    assert_same(network("group_norm"), dm.FedAvg(steps=5, mini_batch=4, learning_rate=0.1), stacks=1)


def test_memory_parts_the_stack():
    model = network("plain")
    held = sum(parameter.nbytes for parameter in model.parameters()) * together.TENSORS_HELD
    _, number = updates_of(model, dm.FedSGD(), stack_bytes=3 * held)
    assert 1 < number <= CLIENTS


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("batch_norm", {}),  # writes its running statistics
        ("dropout", {}),  # draws random numbers
        ("unreached", {"weight_decay": 0.1}),  # torch.optim leaves the idle layer out, and does not decay it
        ("plain", {"max_norm": 1.0}),
        ("plain", {"autocast": "bfloat16"}),
        ("plain", {"optimizer": "nadam"}),  # no rule of its steps
    ],
)
def test_other_clients_train_one_by_one(name, options):
    training = dm.FedAvg(**{"learning_rate": 0.1, "epochs": 2, "mini_batch": 3, "shuffle": True} | options)
    assert_same(network(name).train(), training, stacks=CLIENTS)


def test_a_frozen_batch_norm_shares_the_pass():
    model = network("batch_norm").eval()
    model[1].running_mean.fill_(0.2)
    assert_same(model, dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=3, shuffle=True), stacks=1)


def test_a_model_with_a_memory_trains_one_by_one():
    """What the loss of one client leaves behind is no function of its samples alone."""

    class Counts(nn.Module):
        passes = 0

        def __init__(self):
            super().__init__()
            self.head = nn.Linear(48, 3)

        def forward(self, inputs):
            self.passes += 1
            return self.head(inputs.flatten(1)) * self.passes

    samples = dm.Batch(torch.rand(8, 3, 4, 4), torch.arange(8) % 3)
    assert clients_at_once(dm.FedSGD(), Counts(), samples, torch.arange(8).view(2, 4), dm.CrossEntropy()) == 1


def test_lenet():
    """Max pooling and convolutions of the model that the paper trains."""
    model, rng = load_model("lenet5", {"classes": 4, "channels": 1, "size": 16}, None, seed=0), torch.Generator().manual_seed(1)
    samples = dm.Batch(torch.rand(12, 1, 16, 16, generator=rng), torch.arange(12) % 4)
    chosen, training = torch.randint(12, (3, 8), generator=rng), dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=4, shuffle=True)
    (ours,) = train_each(training, model, samples, chosen, dm.CrossEntropy(), [1, 2, 3])
    for client, seed in enumerate([1, 2, 3]):
        ((alone),) = train_each(training, model, samples, chosen[client : client + 1], dm.CrossEntropy(), [seed])
        for name, change in alone.items():
            torch.testing.assert_close(ours[name][client], change[0], rtol=1e-3, atol=1e-6)
