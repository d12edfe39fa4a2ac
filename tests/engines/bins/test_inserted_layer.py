"""The inserted layer: equally likely bins, functionals in standard deviations, and a model that still answers."""

import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.bins.inserted_layer import (
    LAYER_STRENGTH,
    NATURAL_MOMENTS,
    InsertedLayer,
    _cosine,
    _edges,
    _functional,
    insert_layer,
    measure_moments,
)
from dosimeter.types import Refused

SHAPE = (3, 8, 8)


def inserted(**options) -> InsertedLayer:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 5))
    settings = {"sparse": False, "normalization": None, "moments": None, "round_number": 0} | options
    return insert_layer(model, SHAPE, ("brightness", "cosine", "random"), 24, **settings)


def test_a_normal_variable_falls_into_every_bin_equally_often(rng):
    edges = _edges(10, 0.0)
    values = torch.randn(200_000, generator=rng, dtype=torch.float64)
    counts = torch.histogram(values, edges).hist
    torch.testing.assert_close(counts / 200_000, torch.full((10,), 0.1, dtype=torch.float64), rtol=0, atol=0.004)


def test_a_round_shifts_the_inner_edges_by_less_than_a_bin():
    first, second = _edges(10, 0.0), _edges(10, 0.381966)
    assert bool((second[2:-1] < first[2:-1]).all())
    assert bool((second[2:-1] > first[1:-2]).all())
    assert second[0] == first[0]
    assert second[-1] == first[-1]


@pytest.mark.parametrize("functional", ["brightness", "cosine", "random"])
def test_a_functional_is_in_standard_deviations_of_the_pixels(functional, rng):
    """With the moments measured over some pictures, it has mean zero (but for the random one) and deviation one over them."""
    normalization = dm.Normalization(mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    pixels = torch.rand(400, *SHAPE, generator=rng, dtype=torch.float64)
    inputs = (pixels - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
    moments = measure_moments(inputs, normalization)[functional]
    weight, constant = _functional(functional, moments, SHAPE, normalization, "moments")
    values = inputs.flatten(1) @ weight + constant
    assert float(values.std()) == pytest.approx(1, abs=1e-5)
    if functional != "random":
        assert float(values.mean()) == pytest.approx(0, abs=1e-5)


def test_no_change_of_brightness_moves_the_cosine():
    assert float(_cosine(SHAPE).sum()) == pytest.approx(0, abs=1e-12)
    side = _cosine((1, 1, 4))[0, 0] - math.cos(math.pi / 2)
    assert side.tolist() == pytest.approx([math.cos(math.pi * (i + 0.5) / 4) for i in range(4)])


def test_the_layer_adds_its_mean_answer_to_every_entry(rng):
    layer, inputs = inserted(), torch.rand(4, *SHAPE, generator=rng)
    answers = (inputs.flatten(1) @ layer.rows.weight.T + layer.rows.bias).relu().mean(1)
    expected = inputs + LAYER_STRENGTH * answers.view(-1, 1, 1, 1)
    torch.testing.assert_close(layer.shift(inputs), expected)
    torch.testing.assert_close(layer(inputs), layer.body(expected))


def test_a_sparse_row_answers_inside_its_bin_alone(rng):
    """Between two edges one row rises from 0 to 1; the rows below are full, the rows above silent: the gradient is the bin's own."""
    layer, inputs = inserted(sparse=True), torch.rand(64, *SHAPE, generator=rng)
    answers = layer.rows(inputs.flatten(1)).split(layer.bins, 1)
    for part in answers:
        inner = ((part > 0) & (part < 1)).sum(1)
        assert inner.tolist() == [1] * 64


def test_moments_are_those_of_the_pixels(rng):
    inputs = torch.rand(50, *SHAPE, generator=rng)
    moments = measure_moments(inputs, dm.Normalization())
    means = inputs.double().flatten(1).mean(1)
    assert moments["brightness"] == pytest.approx((float(means.mean()), float(means.std())))
    assert moments["random"][0] == 0.0
    assert NATURAL_MOMENTS["brightness"] == (0.47, 0.14)


def test_what_cannot_be_inserted_is_refused():
    with pytest.raises(Refused, match="already"):
        insert_layer(inserted(), SHAPE, ("brightness",), 8, sparse=False, normalization=None, moments=None, round_number=0)
    with pytest.raises(ValueError, match="input_shape"):
        inserted()(torch.zeros(1, 3, 4, 4))
    with pytest.raises(ValueError, match=r"attack\.bins"):
        insert_layer(nn.Linear(192, 5), SHAPE, ("brightness", "cosine"), 3, sparse=False, normalization=None, moments=None, round_number=0)
