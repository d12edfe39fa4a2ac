"""What bins held: planted samples come back exactly, mixtures are not claimed."""

import pytest
import torch
from torch import nn

from dosimeter.engines.bins.contents import Blur, _are_first_copies, _first_of_each, bin_gradients, decode_bins
from dosimeter.engines.bins.inserted_layer import InsertedLayer
from dosimeter.types import Normalization

SHAPE, SIZE = (3, 4, 4), 48
PIXELS = Normalization()


def layer_with(edges: list[list[float]], functionals: torch.Tensor, *, sparse: bool = False) -> InsertedLayer:
    """Rows ⟨w, x⟩ − edge, or in their sparse form (⟨w, x⟩ − edge)/width, for each functional w."""
    rows = nn.Linear(SIZE, sum(map(len, edges)), dtype=torch.float64)
    with torch.no_grad():
        rows.weight.copy_(torch.cat([weight.expand(len(own), -1) for weight, own in zip(functionals, edges)]))
        rows.bias.copy_(-torch.tensor([edge for own in edges for edge in own]))
    return InsertedLayer(rows, nn.Identity(), tuple(len(own) for own in edges), sparse)


def gradients(layer: InsertedLayer, inputs: torch.Tensor, weights: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row l sums δ (x, 1) over the samples that activate it."""
    active = (layer.rows(inputs) > 0).double()  # (n, k)
    return (active.T * weights) @ inputs, active.T @ weights


@pytest.fixture
def functionals(rng):
    weights = torch.randn(3, SIZE, generator=rng, dtype=torch.float64)
    return weights / weights.norm(dim=1, keepdim=True)


def edges_of(functionals: torch.Tensor, inputs: torch.Tensor, bins: int) -> list[list[float]]:
    values = inputs @ functionals.T
    return [
        torch.linspace(float(column.min()) - 0.01, float(column.max()), bins + 1, dtype=torch.float64)[:-1].tolist() for column in values.T
    ]


def pictures(rng, count: int) -> torch.Tensor:
    return torch.randint(256, (count, SIZE), generator=rng).double() / 255


def test_pictures_in_crowded_bins_come_back_exactly(functionals, rng):
    """Eight pictures in five bins a functional: each functional alone leaves several in one bin."""
    inputs, weights = pictures(rng, 8), torch.rand(8, generator=rng, dtype=torch.float64) + 0.5
    layer = layer_with(edges_of(functionals, inputs, 5), functionals)
    found = decode_bins(layer, *gradients(layer, inputs, weights), PIXELS, SHAPE, None)
    distance = torch.cdist(found.inputs, inputs)
    assert len(found.inputs) >= 5
    assert float(distance.min(1).values.max()) < 1e-8
    torch.testing.assert_close(found.weights, weights[distance.argmin(1)])
    if len(found.inputs) == 8:
        assert found.occupied == 0


def test_without_levels_another_functional_must_agree(functionals, rng):
    inputs, weights = torch.rand(4, SIZE, generator=rng, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    layer = layer_with(edges_of(functionals, inputs, 60), functionals)
    assert len(decode_bins(layer, *gradients(layer, inputs, weights), PIXELS, SHAPE, None).inputs) == 0  # two samples may share all bins
    found = decode_bins(layer, *gradients(layer, inputs, weights), PIXELS, SHAPE, None, samples=4)
    assert sorted(torch.cdist(found.inputs, inputs).argmin(1).tolist()) == [0, 1, 2, 3]
    assert float(torch.cdist(found.inputs, inputs).min(1).values.max()) < 1e-8
    assert found.occupied == 0
    assert found.residual == 0.0
    for count, proved in ((4, 4), (5, 0)):  # as many bins as samples: each has its own
        alone = layer_with(edges_of(functionals[:1], inputs, 60), functionals[:1])
        assert len(decode_bins(alone, *gradients(alone, inputs, weights), PIXELS, SHAPE, None, samples=count).inputs) == proved


def test_a_mixture_is_not_claimed(functionals, rng):
    """Two samples in the only bin: the quotient is a mixture, in the range and in its bin, but between the levels."""
    inputs, weights = pictures(rng, 2), torch.tensor([1.0, 1.7], dtype=torch.float64)
    layer = layer_with([[-100.0, 100.0]], functionals[:1])
    found = decode_bins(layer, *gradients(layer, inputs, weights), PIXELS, SHAPE, None)
    assert len(found.inputs) == 0
    assert found.occupied == 1
    assert found.residual == pytest.approx(1.0)


@pytest.mark.parametrize("tolerated", [True, False])
def test_a_replay_confirms_or_refutes(functionals, rng, tolerated):
    inputs, weights = torch.rand(2, SIZE, generator=rng, dtype=torch.float64), torch.ones(2, dtype=torch.float64)
    layer = layer_with(edges_of(functionals[:1], inputs, 8), functionals[:1])

    class Replay:
        least, exact, surest, shares = 3e-6, 1e-3, 1e-5, (0.5,)

        def labels_can_cancel(self):
            return False

        def __call__(self, inputs, weights):
            return torch.full_like(weights, 0.0 if tolerated else 1.0)

    found = decode_bins(layer, *gradients(layer, inputs, weights), PIXELS, SHAPE, Replay())  # pyright: ignore[reportArgumentType]
    assert len(found.inputs) == (2 if tolerated else 0)


def blur_of(layer: InsertedLayer, norm: float, entry: float) -> Blur:
    ones = torch.ones(sum(layer.bins), dtype=torch.float64)
    return Blur(norms=norm * ones, entries=entry * ones)


def test_what_a_defense_may_have_changed_confirms_nothing(functionals, rng):
    """Pictures and floats that are confirmed without blur, by levels and by another functional, are not behind it."""
    for inputs in (pictures(rng, 4), torch.rand(4, SIZE, generator=rng, dtype=torch.float64)):
        layer = layer_with(edges_of(functionals, inputs, 12), functionals)
        sent = gradients(layer, inputs, torch.ones(4, dtype=torch.float64))
        assert len(decode_bins(layer, *sent, PIXELS, SHAPE, None, samples=4).inputs) == 4
        assert len(decode_bins(layer, *sent, PIXELS, SHAPE, None, blur_of(layer, 0.1, 0.01), samples=4).inputs) == 0
        mild = decode_bins(layer, *sent, PIXELS, SHAPE, None, blur_of(layer, 1e-6, 1e-6), samples=4)
        assert len(mild.inputs) == 4


def test_two_samples_that_share_two_bins_are_no_sample(functionals, rng):
    """Two functionals hold the same mixture. In the third its samples lie apart, so that one sample cannot lie in these bins."""
    inputs = torch.rand(6, SIZE, generator=rng, dtype=torch.float64)
    values = inputs @ functionals.T
    near = 1e-6 * functionals[2]
    inputs[1] = inputs[0] + (inputs[1] - inputs[0]) @ torch.linalg.svd(functionals[:2])[2][2:].T @ torch.linalg.svd(functionals[:2])[2][2:]
    assert torch.allclose((inputs[1] @ functionals[:2].T), values[0, :2])
    layer = layer_with(edges_of(functionals, inputs, 40), functionals)
    found = decode_bins(layer, *gradients(layer, inputs + near, torch.ones(6, dtype=torch.float64)), PIXELS, SHAPE, None, samples=6)
    distance = torch.cdist(found.inputs, inputs).min(1).values
    assert float(distance.max()) < 1e-4
    assert len(found.inputs) >= 4


def test_bins_are_differences_of_neighbouring_rows(functionals):
    layer = layer_with([[0.0, 1.0], [0.0, 1.0, 2.0]], functionals[:2])
    weight, bias = torch.arange(10.0).view(5, 2).square(), torch.tensor([5.0, 3.0, 9.0, 4.0, 1.0])
    inner, outer = bin_gradients(layer, weight, bias)
    assert outer.tolist() == [2, 3, 5, 3, 1]
    expected = [weight[0] - weight[1], weight[1], weight[2] - weight[3], weight[3] - weight[4], weight[4]]
    torch.testing.assert_close(inner, torch.stack(expected))
    layer.sparse = True
    assert bin_gradients(layer, weight, bias)[1] is bias


def test_copies_and_repeated_places_count_once():
    inputs = torch.tensor([[1.0, 0], [0, 1], [1.001, 0], [1, 0.5]])
    assert _are_first_copies(inputs).tolist() == [True, True, False, True]
    places = torch.tensor([[0, 1], [2, 3], [0, 1], [2, 2]])
    assert sorted(_first_of_each(places).tolist()) == [0, 1, 3]


def test_a_functional_whose_bins_are_hidden_separates_nothing(rng, functionals):
    """The rounding of weights can hide what samples add to all bins of one functional."""
    inputs = pictures(rng, 6)
    layer = layer_with(edges_of(functionals, inputs, 3), functionals)
    weight, bias = gradients(layer, inputs, torch.ones(6, dtype=torch.float64))
    weight[-3:], bias[-3:] = 0.0, 0.0
    assert len(decode_bins(layer, weight, bias, PIXELS, SHAPE, None).inputs) <= 6
