import copy

import pytest
import torch
from torch.nn import functional

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.options import OptionError
from dosimeter.types import Refused


def by_hand(model, batch, learning_rate, pieces, momentum):
    """What torch.optim.SGD makes of the same mini-batches."""
    model = copy.deepcopy(model)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate, momentum=momentum)
    for piece in pieces:
        optimizer.zero_grad()
        functional.cross_entropy(model(batch.inputs[piece]), batch.targets[piece]).backward()
        optimizer.step()
    return {name: (before[name] - p.detach()) / (learning_rate * len(pieces)) for name, p in model.named_parameters()}


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **tolerance)


def test_fedsgd_is_the_gradient(classifier, batch):
    functional.cross_entropy(classifier(batch.inputs), batch.targets).backward()
    wanted = {name: p.grad for name, p in classifier.named_parameters()}
    assert_same(FedSGD()(classifier, batch.inputs, batch.targets, CrossEntropy()), wanted)


@pytest.mark.parametrize("mode", [True, False])
def test_fedavg_is_torchs_sgd(normed_classifier, batch, mode):
    model = normed_classifier.train(mode).double()
    batch = type(batch)(batch.inputs.double(), batch.targets)
    training = FedAvg(learning_rate=0.05, epochs=2, mini_batch=4, momentum=0.9)
    wanted = by_hand(model, batch, 0.05, [slice(0, 4), slice(4, 6)] * 2, 0.9)
    assert_same(training(model, batch.inputs, batch.targets, CrossEntropy()), wanted, rtol=1e-9, atol=1e-12)


def test_one_local_step_is_fedsgd(classifier, batch):
    one = FedAvg(steps=1, learning_rate=0.1)(classifier.double(), batch.inputs.double(), batch.targets, CrossEntropy())
    assert_same(one, FedSGD()(classifier, batch.inputs.double(), batch.targets, CrossEntropy()), rtol=1e-9, atol=1e-13)


def test_steps_walk_through_the_mini_batches_in_order():
    assert FedAvg(steps=3, mini_batch=2).pieces(4) == [slice(0, 2), slice(2, 4), slice(0, 2)]
    assert FedAvg(mini_batch=3).pieces(4) == [slice(0, 3), slice(3, 4)]


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9, 1.0])
def test_the_gain_is_what_equal_gradients_add_up_to(momentum):
    """The reference: on a loss with slope 1 everywhere, the update of any training is its gain."""
    for steps in (1, 2, 7):
        training = FedAvg(learning_rate=0.25, momentum=momentum, steps=steps)
        slope = training.replay(lambda *_: {"w": torch.ones(1)}, {"w": torch.zeros(1)}, {}, torch.zeros(4, 1), torch.zeros(4))
        assert float(slope["w"]) == pytest.approx(training.gain(4), rel=1e-5)


def test_the_steps_are_those_of_the_mini_batches():
    for training in (FedAvg(), FedAvg(epochs=3), FedAvg(epochs=2, mini_batch=3), FedAvg(steps=5, mini_batch=2)):
        assert training.local_steps(7) == len(training.pieces(7))
        assert training.unit(7) == pytest.approx(0.01 * len(training.pieces(7)))
    assert FedAvg(epochs=3).local_steps(None) == 3
    with pytest.raises(Refused, match="pass batch_size, or steps"):
        FedAvg(mini_batch=2).unit(None)
    with pytest.raises(Refused, match="fedsgd has no learning rate"):
        FedSGD().unit(4)


@pytest.mark.parametrize("training", [FedSGD(), FedAvg(steps=3, learning_rate=0.1)], ids=str)
def test_nothing_is_mutated(normed_classifier, batch, training):
    model = normed_classifier.train()
    before = copy.deepcopy(model.state_dict())
    inputs = batch.inputs.clone()
    training(model, batch.inputs, batch.targets, CrossEntropy())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(inputs, batch.inputs)


@pytest.mark.parametrize("training", [FedSGD(), FedAvg(steps=2, learning_rate=0.1)], ids=str)
def test_a_replay_is_differentiable_in_the_inputs(classifier, batch, training):
    model, inputs = classifier.double(), batch.inputs.double().requires_grad_()

    def size(x):
        update = training(model, x, batch.targets, CrossEntropy(), create_graph=True)
        return sum(change.square().sum() for change in update.values())

    (gradient,) = torch.autograd.grad(size(inputs), inputs)
    direction = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    step = 1e-6
    slope = (size(inputs + step * direction) - size(inputs - step * direction)) / (2 * step)
    torch.testing.assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-5, atol=1e-9)


def test_frozen_parameters_are_not_sent(classifier, batch):
    classifier[0].weight.requires_grad_(False)
    assert "0.weight" not in FedSGD()(classifier, batch.inputs, batch.targets, CrossEntropy())


def test_refusal():
    with pytest.raises(OptionError, match=r"steps: expected a positive int, got 0"):
        FedAvg(steps=0)


@pytest.mark.parametrize("options", [{"steps": 10**9}, {"epochs": 10**9}, {"epochs": 10**6, "mini_batch": 1}])
def test_more_local_steps_than_days_hold_are_refused_before_they_are_listed(options):
    with pytest.raises(ValueError, match="training: expected at most 1000000 local steps, got"):
        FedAvg(**options).pieces(8)
