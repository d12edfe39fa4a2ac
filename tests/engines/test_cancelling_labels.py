"""Samples whose gradients cancel hide behind one more sample: no attack claims their mixture."""

from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.cancelling_labels import every_label, labels_can_cancel, sums_may_pass
from dosimeter.interfaces import ActiveAttack


def network(seed: int, classes: int, scale: float) -> nn.Module:
    """It predicts nearly the same for all inputs: 1/C for each class."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 30), nn.LeakyReLU(0.1), nn.Linear(30, classes)).eval()
    with torch.no_grad():
        model[3].weight.mul_(scale)
        model[3].bias.zero_()
    return model


def false_claims(method, seed: int, labels: list[int], scale: float, levels: bool = False) -> int:
    """Claims that are no samples. The samples differ little, so that x_1 + x_2 − x_3 is a picture too, with `levels` one of 8 bits."""
    inputs = 0.4 + 0.2 * torch.rand(len(labels), 1, 4, 4, generator=torch.Generator().manual_seed(seed))
    inputs = (255 * inputs).round() / 255 if levels else inputs
    model = network(seed, max(labels) + 1, scale)
    model = method.tamper(model) if isinstance(method, ActiveAttack) else model
    found = dm.reconstruct(dm.observe(model, dm.Batch(inputs, torch.tensor(labels))), method)
    if not found.premises:
        return 0
    apart = torch.cdist(found.inputs.flatten(1), inputs.flatten(1)) / inputs.flatten(1).norm(dim=1)
    return int((apart.amin(1) > 0.02).sum())


ATTACKS = [
    dm.attack("linear_recursion"),
    dm.attack("trap_weights", input_shape=(1, 4, 4), expected=3),
    dm.attack("imprint", input_shape=(1, 4, 4), bins=6),
    dm.attack("imprint", input_shape=(1, 4, 4), bins=20),
]


@pytest.mark.parametrize("attack", ATTACKS, ids=["linear_recursion", "trap_weights", "imprint of 6", "imprint of 20"])
def test_no_mixture_of_samples_whose_labels_cancel_is_claimed(attack) -> None:
    settings = product(range(6), ([0, 1, 1], [0, 1, 1, 1, 0], [0, 1, 2, 2]), (1e-5, 1e-3))
    assert sum(false_claims(attack, *setting) for setting in settings) == 0


@pytest.mark.parametrize("attack", ATTACKS, ids=["linear_recursion", "trap_weights", "imprint of 6", "imprint of 20"])
def test_no_sum_of_pictures_is_claimed_because_it_lies_on_levels(attack) -> None:
    settings = product(range(8), ([0, 0, 1], [0, 1, 1, 1, 0]), (1e-6, 1e-4))
    assert sum(false_claims(attack, *setting, levels=True) for setting in settings) == 0


def test_levels_show_a_picture_where_no_sum_of_pictures_lies_on_them() -> None:
    """Two labels weigh their samples in the ratio p : 1 − p, which is that of small whole numbers at 1/2 and 1/3."""
    inputs = (255 * torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))).round() / 255
    for classes, prediction, silent in (
        (2, 0.5, True),
        (2, 1 / 3, True),
        (2, 0.42, False),
        (2, 0.97, False),
        (3, 1 / 3, True),
        (3, 0.4, False),
    ):
        model = network(0, classes, 1e-6)
        with torch.no_grad():
            model[3].bias[0] = torch.logit(torch.tensor(prediction)) + torch.tensor(float(classes - 1)).log()
        exposure = dm.observe(model, dm.Batch(inputs, torch.tensor([0, 1, 1])))
        assert sums_may_pass(replace(exposure, public=replace(exposure.public, batch_size=8)), inputs).tolist() == [silent] * 3
    sure = network(0, 2, 3.0)  # predictions vary from input to input, and are nowhere near 1/2
    with torch.no_grad():
        sure[3].bias[0] = 3.0
    assert not sums_may_pass(dm.observe(sure, dm.Batch(inputs, torch.tensor([0, 1, 1]))), inputs).any()


def test_local_steps_prove_no_mean_by_neurons_that_all_classes_weigh_alike() -> None:
    """Equal outgoing weights give a neuron no gradient at first, and that of the samples' mean later: rows that agree prove nothing."""
    for seed in range(4):
        inputs = 0.4 + 0.2 * torch.rand(5, 1, 4, 4, generator=torch.Generator().manual_seed(seed))
        model = network(seed, 2, 1.0)
        with torch.no_grad():
            model[1].bias.fill_(5.0)  # every sample fires every neuron
            model[3].weight.copy_(1e-4 * model[3].weight.sign())
        training = dm.FedAvg(learning_rate=1.0, steps=2)
        found = dm.reconstruct(dm.observe(model, dm.Batch(inputs, torch.tensor([0, 0, 1, 1, 0])), training=training), "linear_recursion")
        assert not found.premises


def test_only_predictions_that_are_means_of_labels_let_samples_cancel() -> None:
    """Reference: all batches of up to four samples, tried one by one."""
    for prediction in ([0.5, 0.5], [0.25, 0.75], [0.3, 0.7], [1 / 3, 1 / 3, 1 / 3], [0.5, 0.5, 0.0], [0.2, 0.3, 0.5], [1.0, 0.0]):
        p, labels = torch.tensor(prediction).double(), every_label(len(prediction))
        errors = p - labels  # softmax cross-entropy's
        batches = [batch for count in range(1, 5) for batch in product(range(len(p)), repeat=count)]
        cancel = [batch for batch in batches if errors[list(batch)].sum(0).abs().max() < 1e-6 and errors[batch[0]].abs().max() > 1e-6]
        assert labels_can_cancel(errors, errors, labels, 5) == bool(cancel), prediction
        assert not labels_can_cancel(errors, errors * 1.01, labels, 5)  # predictions that vary with the input add weight that shows
    assert not labels_can_cancel(*[torch.tensor([[-0.5, 0.5], [0.5, -0.5]]).double()] * 2, every_label(2), 9, torch.tensor([1]))
    assert labels_can_cancel(*[torch.tensor([[-0.5, 0.5], [0.5, -0.5]]).double()] * 2, every_label(2), 9, torch.tensor([0, 1]))
