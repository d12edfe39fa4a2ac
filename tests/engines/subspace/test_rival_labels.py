"""How much worse another label fits: the fast margins against least squares for every label, and a label that nothing determines."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import one_hot

from dosimeter.engines.subspace.certificate import DEVIATIONS, equation_variance
from dosimeter.engines.subspace.equations import build_equations, probabilities, slopes, weighted_errors, whole_span
from dosimeter.engines.subspace.rival_labels import THIRD_SHARE, label_margins
from dosimeter.engines.subspace.spectrum import factor


def rises(equations, t, label, rows):
    """The rise of the whitened residual energy of one solution from its own label to each of the error rows (m, C), by least squares."""
    span = whole_span(equations)
    p = probabilities(equations, span, t[None])
    own = weighted_errors(equations, span, p, label[None])
    deviation = equation_variance(equations, t[None], p, own @ span.left)[0].sqrt()
    explains = torch.cat([span.left, slopes(replace(equations, blends=False), span, p)[0]], 1) / deviation[:, None]
    wanted = torch.cat([own, rows]).T / deviation[:, None]
    left = wanted - explains @ torch.linalg.lstsq(explains / explains.norm(dim=0), wanted).solution.div(explains.norm(dim=0)[:, None])
    energy = left.square().sum(0)
    return energy[1:] - energy[0]


def test_margins_of_classes_agree_with_least_squares(plant):
    planted = plant(noise=1e-6)
    equations, margins = planted.equations, label_margins(planted.equations, planted.t, planted.labels)
    p = probabilities(equations, whole_span(equations), planted.t)
    for sample, label in enumerate(planted.labels):
        others = torch.tensor([other for other in range(30) if other != int(label)])
        rows = (p[sample] - one_hot(others, 30)) * equations.spectrum.weights
        expected = rises(equations, planted.t[sample], label, rows).min().sqrt()
        assert float(margins[sample]) == pytest.approx(float(expected), rel=1e-6)
    assert float(margins.min()) > 10 * DEVIATIONS


def test_margins_of_given_soft_labels_agree_with_least_squares(plant):
    soft = torch.softmax(3 * torch.randn(6, 30, generator=torch.Generator().manual_seed(1), dtype=torch.float64), 1)
    planted = plant(soft=soft, noise=1e-6)
    equations, index = replace(planted.equations, targets=soft), torch.arange(6)
    margins = label_margins(equations, planted.t, index)
    p = probabilities(equations, whole_span(equations), planted.t)
    for sample in range(6):
        rows = (p[sample] - soft[index != sample]) * equations.spectrum.weights
        expected = rises(equations, planted.t[sample], index[sample], rows).min().sqrt()
        assert float(margins[sample]) == pytest.approx(float(expected), rel=1e-6)


def test_a_blend_is_sure_where_a_small_share_of_a_third_class_would_show(plant):
    planted = plant(noise=1e-7)
    equations = replace(planted.equations, blends=True)
    pairs = planted.labels * 31  # each class with itself
    margins = label_margins(equations, planted.t, pairs)
    quieter = label_margins(equations, planted.t[:1], pairs[:1])
    assert float(quieter) == pytest.approx(float(margins[0]))
    hard = label_margins(planted.equations, planted.t, planted.labels)
    assert bool((margins <= 1.001 * THIRD_SHARE * hard).all())  # the share of a third class comes beside a share of the second
    assert float(margins.min()) > DEVIATIONS


def test_more_noise_makes_labels_less_sure(plant):
    margins = [float(label_margins(p.equations, p.t, p.labels).min()) for p in (plant(noise=10.0**-power) for power in (7, 6, 5))]
    assert margins[0] / margins[1] == pytest.approx(10, rel=0.3)
    assert margins[1] / margins[2] == pytest.approx(10, rel=0.3)


def test_nearly_collinear_features_leave_their_labels_open():
    """Rows of labels are then multiples of one vector, up to rounding: the errors of two labels cannot be told apart."""
    margins = {}
    for spread in (0.3, 0.003):
        rng = torch.Generator().manual_seed(0)
        weight, bias = torch.randn(40, 60, generator=rng, dtype=torch.float64) / math.sqrt(60), torch.zeros(40, dtype=torch.float64)
        features = torch.relu(torch.randn(60, generator=rng, dtype=torch.float64)) * (
            1 + spread * torch.randn(6, 60, generator=rng, dtype=torch.float64)
        )
        labels = torch.tensor([5, 12, 7, 30, 5, 12])
        error = torch.softmax(features @ weight.T + bias, 1) - one_hot(labels, 40)
        spectrum = factor((error.T @ features / 6).float().double(), 6e-8, rng, at_most=6)
        equations = build_equations(spectrum, weight, bias, model_unit=1.2e-7)
        margins[spread] = float(label_margins(equations, features @ spectrum.right.T / spectrum.values, labels).max())
    assert margins[0.3] > 1000 * DEVIATIONS
    assert margins[0.003] < DEVIATIONS


def test_without_spare_equations_no_label_is_sure(plant):
    planted = plant(size=6, classes=13)
    assert label_margins(planted.equations, planted.t, planted.labels).tolist() == [0.0] * 6
