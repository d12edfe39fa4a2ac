import copy

import pytest
import torch
from torch.nn import functional

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedAvg
from dosimeter.config import construct, describe
from dosimeter.interfaces import Training
from dosimeter.options import OptionError
from dosimeter.randomness import global_seed
from dosimeter.types import Batch, Refused

OPTIMISERS = {
    "nesterov": {"optimizer": "SGD", "momentum": 0.9, "weight_decay": 0.1, "optimizer_options": {"nesterov": True}},
    "dampened": {"momentum": 0.5, "optimizer_options": {"dampening": 0.3}},
    "adam": {"optimizer": "adam", "weight_decay": 0.1, "optimizer_options": {"betas": [0.8, 0.9], "eps": 1e-6}},
    "adamw": {"optimizer": "AdamW"},
    "rmsprop": {"optimizer": "RMSprop", "momentum": 0.5, "weight_decay": 0.1, "optimizer_options": {"alpha": 0.9}},
    "adagrad": {"optimizer": "Adagrad", "optimizer_options": {"lr_decay": 0.1}},
}
HABITS = {
    "accumulating": {"mini_batch": 2, "accumulate": 2},
    "clipping": {"mini_batch": 3, "max_norm": 0.05},
    "proximal": {"mini_batch": 3, "proximal": 2.0},
    "frozen": {"frozen": ("0",), "max_norm": 0.05},
    "everything": {"mini_batch": 2, "accumulate": 2, "max_norm": 0.5, "proximal": 0.1, "frozen": ("0.bias",), "momentum": 0.9},
}


def by_hand(model, batch, training, order=None):
    """The weights after a client's own loop with torch.optim, on the model itself."""
    before, model = model, copy.deepcopy(model)
    named = {name: p for name, p in model.named_parameters() if not name.startswith(training.frozen or "\0")}
    kind = next(getattr(torch.optim, name) for name in dir(torch.optim) if name.lower() == training.optimizer.lower())
    given = dict(training.optimizer_options or {})
    given |= {"momentum": training.momentum} if training.momentum else {}
    given |= {} if training.weight_decay is None else {"weight_decay": training.weight_decay}
    optimizer = kind(list(named.values()), lr=training.learning_rate, **given)
    size = training.mini_batch or len(batch.inputs)
    for _ in range(training.epochs):
        shuffled = torch.arange(len(batch.inputs)) if order is None else order()
        pieces = shuffled.split(size)
        for first in range(0, len(pieces), training.accumulate):
            group = pieces[first : first + training.accumulate]
            model.zero_grad()
            for piece in group:
                (functional.cross_entropy(model(batch.inputs[piece]), batch.targets[piece]) / len(group)).backward()
            pull = sum((p - q.detach()).square().sum() for p, q in zip(named.values(), (dict(before.named_parameters())[n] for n in named)))
            (training.proximal / 2 * pull).backward()
            if training.max_norm is not None:
                torch.nn.utils.clip_grad_norm_(named.values(), training.max_norm)
            optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}


def weights_after(training, model, batch, update):
    """What an update in a gradient's units says of the weights."""
    unit, decay = training.unit(len(batch.inputs)), training.decay(len(batch.inputs))
    return {name: decay * p.detach() - unit * update[name] if name in update else p.detach() for name, p in model.named_parameters()}


def double(classifier, batch):
    return classifier.double(), Batch(batch.inputs.double(), batch.targets)


def assert_same(left, right, **tolerance):
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], **tolerance)


@pytest.mark.parametrize("options", [*OPTIMISERS.values(), *HABITS.values()], ids=[*OPTIMISERS, *HABITS])
def test_client_and_replay_are_torchs_own_loop(classifier, batch, options):
    model, batch = double(classifier, batch)
    training = FedAvg(learning_rate=0.05, epochs=2, **({"mini_batch": 4} | options))
    sent = training(model, batch.inputs, batch.targets, CrossEntropy())
    assert_same(weights_after(training, model, batch, sent), by_hand(model, batch, training), rtol=1e-9, atol=1e-12)
    replayed = training(model, batch.inputs, batch.targets, CrossEntropy(), create_graph=True)
    assert_same({name: change.detach() for name, change in replayed.items()}, sent, rtol=1e-7, atol=1e-10)


@pytest.mark.parametrize(
    "options", [{"optimizer": "NAdam"}, {"optimizer": "Rprop"}, {"optimizer": "adam", "optimizer_options": {"amsgrad": True}}]
)
def test_steps_without_a_rule_are_simulated_and_not_replayed(classifier, batch, options):
    model, batch = double(classifier, batch)
    training = FedAvg(learning_rate=0.05, epochs=3, **options)
    sent = training(model, batch.inputs, batch.targets, CrossEntropy())
    assert_same(weights_after(training, model, batch, sent), by_hand(model, batch, training), rtol=1e-9, atol=1e-12)
    with pytest.raises(Refused, match="cannot be replayed here"):
        training(model, batch.inputs, batch.targets, CrossEntropy(), create_graph=True)


def test_a_shuffling_client_draws_an_order_for_each_epoch(classifier, batch):
    model, batch = double(classifier, batch)
    training = FedAvg(learning_rate=0.05, epochs=3, mini_batch=2, shuffle=True)
    with global_seed(3, "training"):
        sent = training(model, batch.inputs, batch.targets, CrossEntropy())
    with global_seed(3, "training"):
        wanted = by_hand(model, batch, training, order=lambda: torch.randperm(len(batch.inputs)))
    assert_same(weights_after(training, model, batch, sent), wanted, rtol=1e-9, atol=1e-12)
    assert not training.is_ordered(6)
    assert training.is_ordered(2)
    assert FedAvg(mini_batch=2).is_ordered(6)


def test_the_order_is_the_clients_secret(classifier, batch):
    """The same seed gives the same order for the same batch, and another for another batch."""
    training = FedAvg(learning_rate=0.5, mini_batch=1, shuffle=True)
    orders = []
    for inputs in (batch.inputs, batch.inputs, batch.inputs + 1e-6):
        with torch.random.fork_rng():
            exposure = dm.observe(classifier, Batch(inputs, batch.targets), training=training, seed=1)
        orders.append(exposure.update["0.weight"])
    assert torch.equal(orders[0], orders[1])
    assert float((orders[0] - orders[2]).norm()) > 1e-4 * float(orders[0].norm())


def test_accumulated_mini_batches_are_one_larger_one(classifier, batch):
    model, batch = double(classifier, Batch(batch.inputs[:4], batch.targets[:4]))
    small, large = FedAvg(mini_batch=2, accumulate=2, epochs=2), FedAvg(epochs=2)
    updates = [training(model, batch.inputs, batch.targets, CrossEntropy()) for training in (small, large)]
    assert_same(*updates, rtol=1e-9, atol=1e-12)
    assert small.local_steps(4) == large.local_steps(4) == 2


@pytest.mark.parametrize(
    "options", [{}, {"momentum": 0.9}, OPTIMISERS["nesterov"], {"weight_decay": 0.3, "proximal": 0.7, "momentum": 0.5}], ids=str
)
def test_gain_and_decay_take_constant_gradients_apart(options):
    """The law: on a loss with slope g everywhere, the update is gain · g whatever the weights are."""
    for steps in (1, 2, 7):
        training = FedAvg(learning_rate=0.25, steps=steps, **options)
        for start in (0.0, 3.0):
            weight = torch.full((1,), start, dtype=torch.float64)
            update = training.replay(lambda *_: {"w": torch.full((1,), 2.0).double()}, {"w": weight}, {}, torch.zeros(4, 1), torch.zeros(4))
            assert float(update["w"]) == pytest.approx(2 * training.gain(4), rel=1e-9)


BOUNDED = {
    "adam": {},
    "quick means": {"optimizer": "adam", "optimizer_options": {"betas": [0.5, 0.9]}},
    "adamw": {"weight_decay": 0.2},
    "rmsprop": {"momentum": 0.5, "optimizer_options": {"alpha": 0.8}},
    "adagrad": {"weight_decay": 0.1, "optimizer_options": {"lr_decay": 0.1}},
}


def replayed(training, slopes):
    """The update of a weight whose gradients are these."""
    turn = iter(slopes)
    weights = {"w": torch.ones_like(slopes[0])}
    return training.replay(lambda *_: {"w": next(turn)}, weights, {}, torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize("name", BOUNDED)
def test_no_gradients_move_an_entry_further_than_the_bound(name):
    training = FedAvg(learning_rate=0.25, steps=6, **({"optimizer": name} | BOUNDED[name]))
    rng = torch.Generator().manual_seed(0)
    for _ in range(50):
        update = replayed(training, (10 ** torch.randn(6, 40, generator=rng, dtype=torch.float64)).unbind())
        assert float(update["w"].abs().max()) <= training.largest_entry(4) * (1 + 1e-9)


def test_the_bound_of_adams_step_is_reached():
    """By the worst gradients of Cauchy's inequality: in proportion to w_i / u_i, they make the last of three steps as long as it can be."""
    worst = [torch.full((1,), (0.9 / 0.999) ** back, dtype=torch.float64) for back in (2, 1, 0)]
    moved, bound = [], []
    for steps in (2, 3):
        training = FedAvg(steps=steps, optimizer="adam", optimizer_options={"eps": 0.0})
        update = replayed(training, worst)
        moved.append(steps * float(update["w"]))
        bound.append(steps * training.largest_entry(4))
    assert moved[1] - moved[0] == pytest.approx(bound[1] - bound[0], rel=1e-9)


@pytest.mark.parametrize("name", ["adam", "rmsprop", "adagrad"])
def test_the_replay_of_adaptive_steps_is_differentiable(classifier, batch, name):
    model, batch = double(classifier, batch)
    inputs = batch.inputs.clone()
    inputs[:, 0] = 0.0  # weights without a gradient in any step
    inputs.requires_grad_()
    training = FedAvg(learning_rate=0.05, epochs=3, mini_batch=3, optimizer=name, optimizer_options={"eps": 1e-3})

    def size(x):
        return sum(change.square().sum() for change in training(model, x, batch.targets, CrossEntropy(), create_graph=True).values())

    (gradient,) = torch.autograd.grad(size(inputs), inputs)
    direction = torch.randn(inputs.shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    direction[:, 0] = 0.0
    slope = (size(inputs + 1e-6 * direction) - size(inputs - 1e-6 * direction)) / 2e-6
    torch.testing.assert_close((gradient * direction).sum(), slope.detach(), rtol=1e-4, atol=1e-9)


def test_the_first_step_of_adam_gives_signs_and_no_method_reads_them_as_a_gradient(classifier, batch):
    exposure = dm.observe(classifier, batch, training=FedAvg(optimizer="adam", optimizer_options={"eps": 1e-12}))
    gradient = dm.observe(classifier, batch).update
    for name, change in exposure.update.items():
        clear = gradient[name].abs() > 1e-5
        torch.testing.assert_close(change[clear], gradient[name][clear].sign(), rtol=1e-2, atol=0)
        assert not change[gradient[name] == 0].any()
    for method in ("ilrg", "subspace", "idlg"):
        with pytest.raises(Refused, match=f"{method} reads gradients: Adam divides each step by the gradients' own sizes"):
            dm.recover_labels(exposure, method)
    assert exposure.public.training.gain(4) is None


def test_matching_attacks_replay_adam(classifier, batch):
    exposure = dm.observe(classifier, batch, training=FedAvg(optimizer="adam", epochs=2, mini_batch=3))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=batch.targets, steps=3)
    assert torch.isfinite(found.inputs).all()
    refused = dm.observe(classifier, batch, training=FedAvg(optimizer="nadam", epochs=2))
    with pytest.raises(Refused, match="the steps of NAdam cannot be replayed here; those of SGD, Adam"):
        dm.reconstruct(refused, "inverting_gradients", labels=batch.targets, steps=3)


@pytest.mark.parametrize("options", [OPTIMISERS["nesterov"], OPTIMISERS["adamw"], OPTIMISERS["adam"]], ids=["nesterov", "adamw", "adam"])
def test_received_weights_are_the_update_of_the_simulated_client(classifier, batch, options):
    model, batch = double(classifier, batch)
    training = FedAvg(learning_rate=0.005, epochs=2, mini_batch=4, **options)
    known = {"training": training, "batch_size": len(batch.inputs), "input_shape": batch.inputs.shape[1:]}
    received = dm.receive(model, by_hand(model, batch, training), kind="weights", **known)
    assert_same(received.update, dm.observe(model, batch, training=training).update, rtol=1e-6, atol=1e-9)


def test_a_layer_that_is_declared_frozen_and_moved_is_refused(classifier, batch):
    after = by_hand(classifier, batch, FedAvg())
    known = {"batch_size": len(batch.inputs), "input_shape": batch.inputs.shape[1:]}
    with pytest.raises(ValueError, match=r"0\.weight, 0\.bias moved, and training\.frozen says"):
        dm.receive(classifier, after, kind="weights", training=FedAvg(frozen=("0",)), **known)
    with pytest.raises(ValueError, match=r"training\.frozen: the model trains no parameter or layer 'nowhere'"):
        dm.receive(classifier, after, kind="weights", training=FedAvg(frozen=("nowhere",)), **known)


def test_autocast_trains_in_half_precision(classifier, batch):
    plain, half = (dm.observe(classifier, batch, training=FedAvg(epochs=2, autocast=kind)).update for kind in (None, "bfloat16"))
    error = float(torch.cat([(plain[n] - half[n]).flatten() for n in plain]).norm() / torch.cat([plain[n].flatten() for n in plain]).norm())
    assert 1e-4 < error < 0.1
    exposure = dm.observe(classifier, batch, training=FedAvg(autocast="bfloat16"))
    assert not dm.recover_features(exposure, "subspace").certified.any()


def test_a_training_survives_a_file():
    training = FedAvg(
        optimizer="Adam", weight_decay=0.1, optimizer_options={"betas": [0.8, 0.9]}, shuffle=True, frozen=("0",), max_norm=1.0
    )
    assert construct(Training, describe(training)) == training


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": "adm"}, "optimizer: torch.optim has no optimiser 'adm'; did you mean 'adam'"),
        ({"optimizer": "lbfgs"}, "torch.optim has no optimiser 'lbfgs'"),
        ({"optimizer": "adam", "momentum": 0.9}, r"optimizer_options.momentum: Adam takes no such argument"),
        ({"optimizer": "adam", "optimizer_options": {"beta": 1}}, "did you mean 'betas'"),
        ({"optimizer": "adam", "optimizer_options": {"betas": [2, 2]}}, "Adam refuses them: Invalid beta"),
        ({"optimizer_options": {"nesterov": True}}, "SGD refuses them: Nesterov momentum requires"),
        ({"autocast": "float16"}, "autocast: expected one of 'bfloat16'"),
    ],
)
def test_refusals(options, said):
    with pytest.raises(OptionError, match=said):
        FedAvg(**options)


def test_nothing_is_left_to_train(classifier, batch):
    with pytest.raises(ValueError, match=r"training\.frozen: expected a layer that is left to train"):
        FedAvg(frozen=tuple(name for name, _ in classifier.named_parameters()))(classifier, batch.inputs, batch.targets, CrossEntropy())
