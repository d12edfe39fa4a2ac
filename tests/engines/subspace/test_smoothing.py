"""Smoothing of unknown strength."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def classifier(classes: int, *, head: float = 1.0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, classes)).eval()
    with torch.no_grad():
        model[2].weight.mul_(head)
    return model


def exposed(model: nn.Module, labels: list[int], strength: float) -> dm.Exposure:
    """A client that smooths its labels and does not say so."""
    inputs = torch.rand(len(labels), 8, generator=torch.Generator().manual_seed(0))
    sent = dm.observe(model, dm.Batch(inputs, torch.tensor(labels)), loss=dm.CrossEntropy(smoothing=strength))
    return dm.receive(model, sent.update, input_shape=(8,), batch_size=len(labels))


def test_the_strength_is_found():
    found = dm.recover_features(exposed(classifier(80), [3, 5, 5, 70], 0.2), "subspace", targets="smoothed")
    assert found.labels.sort().values.tolist() == [3, 5, 5, 70]
    assert torch.allclose(found.soft.amax(1), torch.full((4,), 0.8 + 0.2 / 80), atol=1e-5)


@pytest.mark.parametrize("head", [0.0, 1e-12, 1e4])
def test_equations_without_a_slope_are_no_crash_and_no_false_certificate(head):
    """Logits that are all equal, or so far apart that the softmax is flat: the equations hardly depend on the sample."""
    model = classifier(12, head=head)
    found = dm.recover_features(exposed(model, [3, 5], 0.1), "subspace", targets="smoothed")
    truth = model[:2](torch.rand(2, 8, generator=torch.Generator().manual_seed(0))).detach()
    error = (torch.cdist(found.features, truth) / torch.linalg.vector_norm(truth, dim=1)).amin(1)
    assert not bool((found.certified & (error > found.error_bar)).any())
