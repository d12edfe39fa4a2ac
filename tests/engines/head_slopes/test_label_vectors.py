"""Label vectors out of the head's gradient: exact over seeds, silent where the equations do not determine them."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.head_slopes.label_vectors import Head64, find_label_vectors


def draw(seed, samples, classes, features=64, size=1.0, rate=0.3):
    """Features that no zero marks, label vectors, and the head's gradient in single precision."""
    rng = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, features, generator=rng).relu() + 0.3
    weight, bias = size * torch.randn(classes, features, generator=rng) / features**0.5, 0.1 * torch.randn(classes, generator=rng)
    vectors = (torch.rand(samples, classes, generator=rng) < rate).float()
    errors = (torch.sigmoid(inputs @ weight.T + bias) - vectors) / (samples * classes)
    head = Head64(
        gradient=(errors.T @ inputs).double(), weight=weight.double(), bias=bias.double(), unit=2.0**-24, noise=0.0, scale=classes
    )
    return head, inputs, vectors


@pytest.mark.parametrize(("samples", "classes"), [(1, 12), (3, 8), (4, 20), (8, 20)])
def test_every_sample_comes_back_within_its_error_bar(samples, classes):
    for seed in range(3):
        head, inputs, vectors = draw(seed, samples, classes)
        found = find_label_vectors(head, samples, torch.Generator().manual_seed(seed))
        assert found.complete
        distances = torch.cdist(found.features, inputs.double()) / inputs.norm(dim=1)
        nearest = distances.argmin(1)
        assert sorted(nearest.tolist()) == list(range(samples))
        assert bool((distances.amin(1) <= found.error_bar).all())
        assert torch.equal(found.vectors, vectors[nearest].double())
        assert found.times.tolist() == [1] * samples


def test_the_batch_size_need_not_be_declared():
    head, _, vectors = draw(5, 3, 20)
    found = find_label_vectors(head, None, torch.Generator().manual_seed(0))
    assert (found.samples, len(found.vectors)) == (3, 3)
    assert sorted(found.vectors.tolist()) == sorted(vectors.tolist())


def test_nothing_is_claimed_where_unknowns_outnumber_equations():
    head, _, _ = draw(0, 6, 10)
    assert len(find_label_vectors(head, 6, torch.Generator().manual_seed(0)).features) == 0


def test_nothing_is_claimed_of_a_gradient_of_other_labels():
    """Labels between 0 and 1 have no vector of zeros and ones, and no accident passes for one."""
    for seed in range(3):
        head, inputs, vectors = draw(seed, 4, 20)
        errors = (torch.sigmoid(inputs @ head.weight.float().T + head.bias.float()) - 0.2 - 0.6 * vectors) / 80
        soft = Head64(**{**vars(head), "gradient": (errors.T @ inputs).double()})
        assert len(find_label_vectors(soft, 4, torch.Generator().manual_seed(seed)).features) == 0


@pytest.mark.parametrize("distance", [1e-5, 2e-4, 1e-3, 1e-2, 3e-2])
def test_the_bar_of_two_alike_samples_with_the_same_labels_holds_their_distance(distance):
    """They look like one that occurs twice, whose feature is their mean."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 50))
    inputs, targets = torch.rand(2, 1, 8, 8), (torch.rand(1, 50) > 0.5).float().expand(2, -1)
    inputs[1] = inputs[0] + distance * torch.randn(1, 8, 8)
    batch = dm.Batch(inputs, targets)
    try:
        found = dm.recover_features(dm.observe(model, batch, loss="binary_cross_entropy"), "head_slopes")
    except dm.Refused:  # two directions, and room for two samples: none of them occurs twice
        assert distance > 1e-4
        return
    true = model[:-1](inputs).detach().double()
    error = torch.cdist(found.features.double(), true).amin(1) / true.norm(dim=1)
    assert bool((error[found.certified] <= found.error_bar[found.certified]).all())
    if bool(found.certified.any()):
        assert any("copies are equal" in premise for premise in found.premises)


def test_more_samples_than_declared_prove_nothing():
    """A loss that sums over classes, where the declared one takes the mean, makes every share some ten samples large."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 12))
    batch = dm.Batch(torch.rand(3, 1, 8, 8), (torch.rand(3, 12) > 0.5).float())
    exposure = dm.observe(model, batch, loss=dm.BinaryCrossEntropy(over_classes="sum"))
    told = replace(exposure, public=replace(exposure.public, loss=dm.BinaryCrossEntropy()))
    assert bool(dm.recover_features(exposure, "head_slopes").certified.all())
    with pytest.raises(dm.Refused, match="directions of the gradient are certified"):
        dm.recover_labels(told, "head_slopes")
