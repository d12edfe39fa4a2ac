import pytest
import torch
from torch import nn

from dosimeter.client.observe import observe
from dosimeter.engines.bins.inserted_layer import insert_layer
from dosimeter.labels.gradfilt import GradFiltLabels
from dosimeter.runs.reproduction.side_measures import bins_of_samples, calibration_error, determined_by_bins, determined_share
from dosimeter.types import Batch


def test_samples_alone_in_a_bin_or_settled_by_equations_are_determined():
    assert determined_share([torch.tensor([0, 1, 2])]) == 1.0
    assert determined_share([torch.tensor([0, 0, 1])]) == pytest.approx(1 / 3)
    assert determined_share([torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])]) == 1.0  # the third settles the second, that the first


def test_a_samples_bin_is_the_number_of_edges_below_it(rng):
    layer = insert_layer(
        nn.Linear(4, 2), (4,), ("brightness",), 8, sparse=False, normalization=None, moments={"brightness": (0.5, 0.2)}, round_number=0
    )
    (bins,) = bins_of_samples(layer, torch.tensor([[0.1] * 4, [0.5] * 4, [0.9] * 4]))
    assert bins.tolist() == sorted(bins.tolist())
    assert len(bins.unique()) == 3


def test_calibrated_gradients_equal_those_of_the_target_samples(rng):
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4))
    inputs, labels = torch.rand(6, 6, generator=rng), torch.tensor([0, 1, 1, 2, 3, 1])
    sent = GradFiltLabels(targets=(1,), input_shape=(6,)).tamper(model)
    own = labels == 1
    exposure, alone = observe(sent, Batch(inputs, labels)), observe(sent, Batch(inputs[own], labels[own]))
    assert calibration_error(exposure, alone, Batch(inputs[own], labels[own])) < 1e-5  # type: ignore[operator]
    assert calibration_error(exposure, observe(sent, Batch(inputs[own][:1], labels[own][:1])), Batch(inputs, labels)) > 0.1  # type: ignore[operator]
    assert determined_by_bins(exposure, alone, Batch(inputs[own], labels[own])) is None
