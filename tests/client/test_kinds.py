"""Weights, differences and gradients are told apart by measurement, whatever the model, its stage, the learning rate and the momentum."""

import copy
import importlib
import itertools
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dosimeter as dm
from dosimeter.client.kinds import grid_of, keeps_class_sums, resemblance
from dosimeter.models.loading import load_model

KINDS = ("gradient", "difference", "weights")


def make(name: str) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        if name == "mlp":
            return nn.Sequential(nn.Flatten(), nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 10)).train()
    return load_model(name, {"classes": 10, "channels": 1} | ({"size": 16} if name == "lenet5" else {}), None, 5).train()


def train(model: nn.Module, images, labels, *, rate: float, momentum: float, steps: int, decay: float = 0.0) -> dict:
    """The first gradient, the difference and the weights after local training, each a state dict with the buffers that belong to it."""
    client = copy.deepcopy(model)
    optimizer = torch.optim.SGD(client.parameters(), rate, momentum=momentum, weight_decay=decay)
    gradient: dict = {}
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(client(images), labels).backward()
        gradient = gradient or {name: parameter.grad.clone() for name, parameter in client.named_parameters()}
        optimizer.step()
    before, after = model.state_dict(), client.state_dict()
    return {"gradient": gradient, "difference": {name: after[name] - before[name] for name in after}, "weights": after}


def pretrain(model: nn.Module, images, labels, epochs: int) -> nn.Module:
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(epochs):
        for chosen in torch.arange(600).split(50):
            optimizer.zero_grad()
            cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimizer.step()
    return model


@pytest.mark.parametrize("epochs", [0, 5], ids=["untrained", "trained"])
@pytest.mark.parametrize("name", ["mlp", "lenet5", "resnet20"])
def test_each_content_under_a_wrong_kind_is_refused(name, epochs, digits):
    images, labels = digits
    images = images.repeat_interleave(2, 2).repeat_interleave(2, 3) if name == "lenet5" else images
    model = pretrain(make(name), images, labels, min(epochs, 1) if name == "resnet20" else epochs)
    settings = itertools.product((1e-4, 1e-2, 1.0), (0.0, 0.9), (1, 5))
    for rate, momentum, steps in [(1e-3, 0.9, 3), (1.0, 0.0, 1)] if name == "resnet20" else settings:
        sent = train(model, images[700:712], labels[700:712], rate=rate, momentum=momentum, steps=steps)
        if not all(bool(torch.isfinite(tensor).all()) for tensor in sent["weights"].values()):
            continue
        training = dm.FedAvg(learning_rate=rate, momentum=momentum, steps=steps)
        for content, kind in itertools.product(KINDS, KINDS):
            facts = {"kind": kind, "input_shape": images.shape[1:], "training": dm.FedSGD() if kind == "gradient" else training}
            if content == kind:
                assert dm.receive(model, sent[content], **facts).update, (rate, momentum, steps, content)
                continue
            with pytest.raises(ValueError, match=r"update: (looks like|is no)"):
                dm.receive(model, sent[content], **facts)


def test_the_refusal_says_what_was_measured(digits):
    model = make("mlp")
    sent = train(model, digits[0][:8], digits[1][:8], rate=0.01, momentum=0.0, steps=1)
    facts = {"input_shape": (1, 8, 8), "training": dm.FedAvg(learning_rate=0.01, steps=1)}
    with pytest.raises(ValueError, match=r"like the weights after training: its cosine .* is 1, .* narrows its spread by .*kind='weights'"):
        dm.receive(model, sent["weights"], kind="difference", **facts)
    with pytest.raises(ValueError, match=r"looks like after − before.*: 100\.0% of \d+ entries .* float32 .*kind='difference'"):
        dm.receive(model, sent["difference"], **facts)
    with pytest.raises(ValueError, match=r"is not the difference of two models: \d+\.\d% of .*kind='gradient'"):
        dm.receive(model, sent["gradient"], kind="difference", **facts)
    with pytest.raises(ValueError, match="looks like before − after"):
        dm.receive(model, {name: -change for name, change in sent["difference"].items()}, kind="difference", **facts)
    averaged = {name: change / 3 for name, change in sent["difference"].items()}
    with pytest.raises(ValueError, match="is not the difference of two models"):
        dm.receive(model, averaged, kind="difference", **facts)
    assert dm.receive(model, averaged, kind="difference", check_kind=False, **facts).update


def test_weights_differences_and_gradients_give_one_update(digits):
    """The law: one plain step gives the same exposure, in whichever kind it is sent."""
    model = make("mlp").double()
    sent = train(model, digits[0][:8].double(), digits[1][:8], rate=0.1, momentum=0.0, steps=1)
    step = dm.FedAvg(learning_rate=0.1, steps=1)
    exposures = [dm.receive(model, sent[kind], kind=kind, input_shape=(1, 8, 8), training=step).update for kind in KINDS]
    for name, change in exposures[0].items():
        assert all(torch.allclose(other[name], change, rtol=1e-9, atol=1e-12) for other in exposures[1:])


def test_several_steps_are_a_simulated_clients_update(digits):
    """The reference: what a simulated client sends in a gradient's units is what the weights after the same training are turned into."""
    model, batch = make("mlp"), dm.Batch(digits[0][:8], digits[1][:8])
    training = dm.FedAvg(learning_rate=0.05, momentum=0.9, steps=4)
    sent = train(model, batch.inputs, batch.targets, rate=0.05, momentum=0.9, steps=4)
    simulated = dm.observe(model, batch, training=training).update
    received = dm.receive(model, sent["weights"], kind="weights", training=training, batch_size=8).update
    assert all(torch.allclose(received[name], change, rtol=1e-3, atol=1e-5) for name, change in simulated.items())


def test_rounded_numbers_are_not_judged_by_their_digits(digits):
    """A gradient or a difference that travelled in half precision has no digits that would tell: neither is refused."""
    model = make("mlp")
    sent = train(model, digits[0][:8], digits[1][:8], rate=0.05, momentum=0.0, steps=2)
    for dtype in (torch.float16, torch.bfloat16):
        for kind in ("gradient", "difference"):
            rounded = {name: change.to(dtype).float() for name, change in sent[kind].items()}
            grid = grid_of(rounded, dict(model.named_parameters()))
            assert not grid.is_difference
            assert not grid.is_off, (dtype, kind, grid)
            assert dm.receive(model, rounded, kind=kind, training=dm.FedAvg(learning_rate=0.05, steps=2)).update


def test_weight_decay_is_no_weights(digits):
    model = make("mlp")
    sent = train(model, digits[0][:8], digits[1][:8], rate=0.05, momentum=0.0, steps=2, decay=0.05)
    assert not resemblance(sent["difference"], dict(model.named_parameters())).is_weights


def test_too_few_entries_tell_nothing():
    weight = {"w": torch.ones(4)}
    assert resemblance({"w": torch.ones(4)}, weight) is None
    assert not grid_of({"w": torch.full((4,), 0.1)}, weight).is_off


@pytest.mark.parametrize("optimizer", ["Adam", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("rate", [1e-3, 3e-2])
def test_steps_as_large_as_the_weights_mislead_nobody(optimizer, rate, digits):
    """After Adam's steps the weights are far away, and a gradient may be as large as they are."""
    images, labels = digits
    model = make("mlp")
    client = copy.deepcopy(model)
    steps = getattr(torch.optim, optimizer)(client.parameters(), lr=rate)
    for first in range(0, 80, 4):
        steps.zero_grad()
        cross_entropy(client(images[first : first + 4]), labels[first : first + 4]).backward()
        steps.step()
    before = {name: parameter.detach() for name, parameter in model.named_parameters()}
    after = {name: parameter.detach() for name, parameter in client.named_parameters()}
    gradient = {name: parameter.grad for name, parameter in client.named_parameters() if parameter.grad is not None}
    assert resemblance(after, before).is_weights
    assert not resemblance({name: after[name] - before[name] for name in after}, before).is_weights
    for size in (0.1, 1.0, 10.0):
        assert not resemblance({name: size * change for name, change in gradient.items()}, before).is_weights


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad"])
@pytest.mark.parametrize("rate", [0.2, 1.0])
@pytest.mark.parametrize("steps", [1, 4])
def test_steps_far_beyond_the_weights_keep_the_kinds_apart(name, rate, steps, digits):
    """A trained model's weights lie along what Adam adds to them: slopes and cosines mislead, entropies do not."""
    images, labels = digits
    model = pretrain(make("mlp"), images, labels, 5)
    client, gradient = copy.deepcopy(model), {}
    optimizer = getattr(torch.optim, name)(client.parameters(), lr=rate)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(client(images[700:712]), labels[700:712]).backward()
        gradient = gradient or {key: parameter.grad.clone() for key, parameter in client.named_parameters() if parameter.grad is not None}
        optimizer.step()
    before, after = model.state_dict(), client.state_dict()
    sent = {"gradient": gradient, "difference": {key: after[key] - before[key] for key in after}, "weights": after}
    training = dm.FedAvg(learning_rate=rate, optimizer=name.lower(), steps=steps)
    for content, kind in itertools.product(KINDS, KINDS):
        declared = dm.FedSGD() if kind == "gradient" else training
        fits = dm.preflight(model, sent[content], kind=kind, input_shape=(1, 8, 8), training=declared).fits
        assert fits == (content == kind), (content, kind)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_weights_that_training_threw_far_away_are_still_weights(momentum, bias):
    """A rate of 1 throws the weights where nothing resembles the old ones. Their sums over the classes stay."""
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.SiLU(), nn.Flatten(), nn.Linear(8 * 49, 7, bias=bias)
    ).train()
    images, labels = torch.rand(8, 3, 16, 16), torch.randint(7, (8,))
    sent = train(model, images, labels, rate=8.0, momentum=momentum, steps=4, decay=1e-3)["weights"]
    training = dm.FedAvg(learning_rate=8.0, momentum=momentum, weight_decay=1e-3, steps=4)
    assert dm.receive(model, sent, kind="weights", training=training, input_shape=(3, 16, 16)).update
    for kind in ("gradient", "difference"):
        declared = dm.FedSGD() if kind == "gradient" else training
        with pytest.raises(ValueError, match=r"looks like the weights after training.*; pass kind='weights'"):
            dm.receive(model, sent, kind=kind, training=declared, input_shape=(3, 16, 16))


def test_sums_over_classes_of_other_numbers():
    rng = torch.Generator().manual_seed(0)
    weight, noise = torch.randn(2, 7, 40, generator=rng)
    balanced = noise - noise.mean(0)
    assert keeps_class_sums(100 * balanced + 0.99 * weight, weight)
    assert not keeps_class_sums(100 * balanced, weight)  # a gradient
    assert not keeps_class_sums(100 * balanced - 0.01 * weight, weight)  # a difference behind weight decay
    assert not keeps_class_sums(100 * balanced + 0.01 * weight, weight)  # the same reversed
    assert not keeps_class_sums(noise, weight)  # steps of Adam
    assert not keeps_class_sums(weight[:, :8], weight[:, :8])  # too few to tell
    assert not keeps_class_sums(balanced, torch.zeros_like(weight))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_steps_of_one_size_are_no_gradient(dtype, digits):
    """Their digits tell nothing: they are much larger than the weights, or rounded. Their sums over the classes do."""
    images, labels = digits
    model = make("mlp")
    client = copy.deepcopy(model)
    optimizer = torch.optim.RMSprop(client.parameters(), lr=0.03)
    cross_entropy(client(images[:12]), labels[:12]).backward()
    gradient = {name: parameter.grad.to(dtype).float() for name, parameter in client.named_parameters() if parameter.grad is not None}
    optimizer.step()
    difference = {name: (after - before).to(dtype).float() for (name, before), after in zip(model.named_parameters(), client.parameters())}
    assert dm.receive(model, gradient, input_shape=(1, 8, 8)).update
    with pytest.raises(
        ValueError, match=r"looks like steps of Adam .*3\.weight does not sum to zero over the classes; pass kind='difference'"
    ):
        dm.receive(model, {name: change.detach() for name, change in difference.items()}, input_shape=(1, 8, 8))
    decayed = {name: slope + 0.1 * before for (name, before), slope in zip(model.named_parameters(), gradient.values())}
    assert dm.receive(model, {name: slope.detach() for name, slope in decayed.items()}, input_shape=(1, 8, 8), check_kind=True).update


def test_random_clients_are_told_apart(monkeypatch):
    """Models, optimisers, learning rates and steps that nobody chose; the benchmark counts two hundred of them."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[2] / "benchmarks")
    kinds = importlib.import_module("kinds")
    for seed, client in kinds.clients(300, 12):
        for content, kind in itertools.product(KINDS, KINDS):
            assert bool(kinds.receive(client, content, kind)) == (content != kind), (seed, client.words, content, kind)
