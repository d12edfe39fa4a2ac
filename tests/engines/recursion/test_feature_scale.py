"""The scale of a single sample's feature, from the form of its label: planted features in float64."""

import pytest
import torch
from torch.nn.functional import one_hot

from dosimeter.engines.recursion.feature_scale import LabelForm, _misfit, _rank_one, scale_feature

CLASSES, FEATURES = 12, 20


def planted(label: torch.Tensor, rng, *, bias: bool = True, classes: int = CLASSES):
    weight = torch.randn(classes, FEATURES, generator=rng, dtype=torch.float64) / 3
    offset = torch.randn(classes, generator=rng, dtype=torch.float64) if bias else None
    feature = torch.randn(FEATURES, generator=rng, dtype=torch.float64).relu() + 0.1
    logits = weight @ feature + (0 if offset is None else offset)
    return weight, offset, feature, torch.outer(logits.softmax(0) - label, feature)


def hot(*ids: int) -> torch.Tensor:
    return one_hot(torch.tensor(ids), CLASSES).double()


LABELS = {
    "one-hot": hot(4)[0],
    "smoothed": 0.9 * hot(4)[0] + 0.1 / CLASSES,
    "mixture": 0.65 * hot(2)[0] + 0.35 * hot(9)[0],
    "smoothed mixture": 0.9 * (0.65 * hot(2)[0] + 0.35 * hot(9)[0]) + 0.1 / CLASSES,
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", LABELS)
def test_the_scale_is_found_from_the_form_of_the_label(kind, bias, rng):
    weight, offset, feature, gradient = planted(LABELS[kind], rng, bias=bias)
    found = scale_feature(gradient, weight, offset, True, None)
    best = min(found, key=lambda one: float((one.feature - feature).norm()))
    torch.testing.assert_close(best.feature, feature, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(best.label, LABELS[kind], rtol=0, atol=1e-6)
    torch.testing.assert_close(torch.outer(best.error, best.feature), gradient, rtol=1e-6, atol=1e-9)


def test_every_scale_that_fits_explains_the_gradient(rng):
    """Law: f eᵀ is the gradient and e = softmax(W f + b) − y, for each answer."""
    weight, offset, _, gradient = planted(LABELS["mixture"], rng)
    for one in scale_feature(gradient, weight, offset, False, None):
        torch.testing.assert_close(torch.outer(one.error, one.feature), gradient, rtol=1e-6, atol=1e-9)
        torch.testing.assert_close((weight @ one.feature + offset).softmax(0) - one.label, one.error, rtol=1e-6, atol=1e-8)


def test_a_known_label_of_any_form_settles_the_scale(rng):
    label = torch.randn(CLASSES, generator=rng, dtype=torch.float64).softmax(0)
    weight, offset, feature, gradient = planted(label, rng)
    best = scale_feature(gradient, weight, offset, True, label)[0]
    torch.testing.assert_close(best.feature, feature, rtol=1e-6, atol=1e-7)
    assert best.misfit < 1e-9


def test_a_negative_feature_needs_both_signs(rng):
    weight, offset, feature, _ = planted(LABELS["one-hot"], rng)
    feature = -feature
    gradient = torch.outer((weight @ feature + offset).softmax(0) - LABELS["one-hot"], feature)
    found = scale_feature(gradient, weight, offset, False, LABELS["one-hot"])
    assert min(float((one.feature - feature).norm()) for one in found) < 1e-6


def test_the_misfit_is_the_distance_from_the_form():
    labels = torch.tensor([[0.1, 0.1, 0.7, 0.1], [0.0, 0.3, 0.7, 0.0], [0.1, 0.2, 0.7, 0.0], [-0.5, 0.5, 1.0, 0.0]], dtype=torch.float64)
    one, two = _misfit(labels, LabelForm(free=1)), _misfit(labels, LabelForm(free=2, empty=True))
    assert one.tolist()[:3] == pytest.approx([0, 0.02**0.5, (0.02 / 3) ** 0.5])
    assert two.tolist()[:3] == pytest.approx([0.1, 0, 0.1])
    assert float(one[3]) > 0.5  # an entry below zero
    assert _misfit(labels, LabelForm(known=labels[1])).tolist()[:2] == pytest.approx([0.015**0.5, 0])


def test_power_iteration_ends_at_the_singular_vectors(rng):
    u, v = torch.randn(7, generator=rng, dtype=torch.float64), torch.randn(9, generator=rng, dtype=torch.float64)
    left, size, right = _rank_one(torch.outer(u, v))
    assert float(size) == pytest.approx(float(u.norm() * v.norm()))
    torch.testing.assert_close(size * torch.outer(left, right), torch.outer(u, v))
    assert float(left.norm()) == pytest.approx(1)
