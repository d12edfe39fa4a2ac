"""Extreme rows: on a head that is sure of its answers they lead to every sample, labels unknown."""

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.engines.subspace.equations import build_equations, whole_span
from dosimeter.engines.subspace.problem import find_sure_samples
from dosimeter.engines.subspace.spectrum import factor, rounding_unit
from dosimeter.engines.subspace.successive_projection import extreme_starts
from dosimeter.interfaces import Exposure
from dosimeter.network.head import Head, find_head

CLASSES, FEATURES, SAMPLES = 200, 256, 24


def sure_head(seed: int) -> nn.Module:
    """A head that is sure of another class for another sample, as trained ones are: what features have in common decides nothing."""
    torch.manual_seed(seed)
    layer = nn.Linear(FEATURES, CLASSES)
    weight = 2 * torch.randn(CLASSES, FEATURES)
    layer.weight.data = weight - weight.mean(1, keepdim=True)
    return nn.Sequential(nn.ReLU(), layer).eval()


def exposed(seed: int, bias: bool = True) -> tuple[Exposure, Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    features = torch.rand(SAMPLES, FEATURES, generator=rng)
    labels = torch.randint(CLASSES // 10, (SAMPLES,), generator=rng)
    defenses = () if bias else (dm.defense("bias_withheld"),)
    return dm.observe(sure_head(seed), dm.Batch(features, labels), defenses=defenses), features, labels


@pytest.mark.parametrize("seed", range(4))
def test_every_sample_of_a_sure_head_is_found_with_its_label(seed):
    exposure, features, labels = exposed(seed)
    head = find_head(exposure)
    assert float(head.logits(features).softmax(1).amax(1).mean()) > 0.7
    found, named = find_sure_samples(exposure, head, torch.Generator(), method="test")
    nearest = torch.cdist(found, features.double()).argmin(1)
    assert nearest.sort().values.tolist() == list(range(SAMPLES))
    assert torch.equal(named, labels[nearest])
    errors = (found - features[nearest]).norm(dim=1) / features.norm(dim=1).mean()
    assert float(errors.median()) < 1e-4
    assert float(errors.max()) < 0.05


def test_the_last_sample_is_found_where_the_others_are_even_if_it_is_predicted_surely_and_rightly():
    exposure, features, labels = exposed(0)
    surest = int(exposure.model(features).softmax(1).amax(1).argmax())
    labels[surest] = exposure.model(features)[surest].argmax()
    exposure = dm.observe(sure_head(0), dm.Batch(features, labels))
    found, named = find_sure_samples(exposure, find_head(exposure), torch.Generator(), method="test")
    nearest = torch.cdist(found, features.double()).argmin(1)
    assert nearest.sort().values.tolist() == list(range(SAMPLES))
    assert torch.equal(named, labels[nearest])


def test_without_a_bias_gradient_there_are_no_starts():
    exposure, _, _ = exposed(0, bias=False)
    found, named = find_sure_samples(exposure, find_head(exposure), torch.Generator(), method="test")
    assert len(found) == len(named) == 0


def test_the_starts_are_rows_that_one_sample_makes():
    """Two samples, sure of classes 2 and 3 and labelled 0 and 1: rows 2 and 3 over their bias entries are the features."""
    weight = 40 * torch.eye(5, dtype=torch.float64)
    features = torch.tensor([[0.1, 0.1, 1.0, 0.2, 0.0], [0.1, 0.2, 0.2, 1.0, 0.1]], dtype=torch.float64)
    labels = torch.tensor([0, 1])
    errors = (features @ weight.T).softmax(1) - nn.functional.one_hot(labels, 5)
    gradient, bias_gradient = errors.T @ features / 2, errors.sum(0) / 2
    head = Head(name="", weight=weight, bias=None, weight_gradient=gradient, bias_gradient=bias_gradient, non_negative=True)
    spectrum = factor(gradient, rounding_unit(gradient), torch.Generator(), at_most=2)
    equations = build_equations(spectrum, head.weight, None, model_unit=1e-16, bias_gradient=bias_gradient)
    nothing, none = torch.empty(0, 2, dtype=torch.float64), torch.empty(0, dtype=torch.long)
    points, named = extreme_starts(equations, whole_span(equations), nothing, nothing, none, non_negative=True)
    order = named.argsort()
    assert named[order].tolist() == [0, 1]
    assert torch.allclose((points @ equations.basis)[order], features, atol=1e-6)
