"""Samples whose gradients cancel hide behind one more sample: no attack claims their mixture."""

from itertools import product

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.cancelling_labels import every_label, labels_can_cancel
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


def false_claims(method, seed: int, labels: list[int], scale: float) -> int:
    """Claims that are no samples. The samples differ little, so that x_1 + x_2 − x_3 is a picture too."""
    inputs = 0.4 + 0.2 * torch.rand(len(labels), 1, 4, 4, generator=torch.Generator().manual_seed(seed))
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
