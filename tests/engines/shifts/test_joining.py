"""One estimate a sample: maps of several layers, the feature and the label in one order; and no certificate where they disagree."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.shifts import recover
from dosimeter.network.probing import input_of


def pictures(samples: int, seed: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(seed)
    coarse = nn.functional.interpolate(torch.rand(samples, 1, 4, 4, generator=rng), (28, 28), mode="bilinear")
    inputs = (coarse + 0.3 * torch.rand(samples, 1, 28, 28, generator=rng)).clamp(0, 1)
    return dm.Batch(inputs, torch.randint(0, 10, (samples,), generator=rng))


class Residual(nn.Module):
    """A strided stem, a block whose shortcut has no weights, and a block behind it; 96 channels on a grid of 4 by 4."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 96, 7, 7)
        self.convolutions = nn.ModuleList(nn.Conv2d(96, 96, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(96) for _ in range(4))
        self.head = nn.Linear(96, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.stem(inputs))
        first, second, third, fourth = (nn.Sequential(*both) for both in zip(self.convolutions, self.norms))
        maps = torch.relu(maps + second(torch.relu(first(maps))))
        maps = torch.relu(maps + fourth(torch.relu(third(maps))))
        return self.head(maps.mean((2, 3)))


def residual(seed: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Residual().eval()


def order_of(found: torch.Tensor, truth: torch.Tensor) -> list[int]:
    return torch.cdist(found.double().flatten(1), truth.double().flatten(1)).argmin(1).tolist()


@pytest.mark.parametrize("layer", [None, "convolutions.1"])
@pytest.mark.parametrize("seed", [31, 32])
def test_maps_features_and_labels_of_one_sample_stand_together(layer, seed):
    """Layer convolutions.1 lies inside of a block: its samples are paired with those of the layer behind the block."""
    model, batch = residual(seed), pictures(4, seed)
    found = dm.recover_maps(dm.observe(model, batch, declare_batch_size=False), layer=layer)
    assert found.certified.all()
    joined = found.samples
    assert joined is not None
    order = order_of(found.maps, input_of(model, found.layer, batch.inputs))
    assert sorted(order) == [0, 1, 2, 3]
    assert order == order_of(joined.features, input_of(model, "head", batch.inputs))
    assert joined.labels is not None
    assert joined.labels.tolist() == batch.targets[order].tolist()
    assert "convolutions.3" in joined.maps
    for name, maps in joined.maps.items():
        truth = input_of(model, name, batch.inputs).double()[order]
        assert float((maps - truth).norm() / truth.norm()) < 1e-4
    assert max(joined.misfits.values()) < 1e-5


def test_maps_that_the_next_layer_refutes_are_not_certified(monkeypatch):
    """Two samples whose halves are exchanged explain neither the next layer's gradient nor the head's."""
    model, batch = residual(33), pictures(4, 33)
    exposure = dm.observe(model, batch)
    right = recover.recover_layer

    def exchanged(*arguments, **options):
        found = right(*arguments, **options)
        maps = found.maps.clone()
        maps[:2, :, 2:] = found.maps[:2, :, 2:].flip(0)
        return recover.replace(found, maps=maps)

    monkeypatch.setattr(recover, "recover_layer", exchanged)
    found = dm.recover_maps(exposure)
    assert not found.certified.any()
    assert found.samples is None
    assert "carried on to" in found.message


def test_without_the_heads_gradient_nothing_is_joined():
    model, batch = residual(34), pictures(3, 34)
    found = dm.recover_maps(dm.observe(model, batch, defenses=(dm.defense("head_withheld"),)))
    assert found.certified.all()
    assert found.samples is None
