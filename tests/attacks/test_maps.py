"""Pictures from maps: exact in eval mode, labels and batch size unknown, and a refusal where no layer shows its maps."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.registry import TRAININGS


class Block(nn.Module):
    """A residual block with a projection, as in ResNet."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(channels, width, 3, stride, 1, bias=False), nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.first_norm, self.second_norm = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.projection = nn.Conv2d(channels, width, 1, stride, bias=False) if stride > 1 else nn.Identity()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = torch.relu(self.first_norm(self.first(inputs)))
        return torch.relu(self.second_norm(self.second(maps)) + self.projection(inputs))


def residual_network(seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        stem = (nn.Conv2d(1, 32, 3, 1, 1), nn.ReLU())
        return nn.Sequential(
            *stem, Block(32, 64, 2), Block(64, 96, 2), Block(96, 96, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)
        )


def errors(found: dm.Reconstruction, batch: dm.Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """PSNR of each sample, and whether its label is right."""
    distance = torch.cdist(found.inputs.flatten(1).double(), batch.inputs.flatten(1).double())
    order = distance.argmin(0)
    assert sorted(order.tolist()) == list(range(len(batch.inputs)))
    return -10 * (found.inputs[order] - batch.inputs).square().flatten(1).mean(1).log10(), found.labels[order] == batch.targets


@pytest.fixture
def batch(digits) -> dm.Batch:
    images, labels = digits
    return dm.Batch(images[40:45], labels[40:45])


def test_a_residual_network_gives_up_its_batch(batch) -> None:
    exposure = dm.observe(residual_network().eval(), batch, declare_batch_size=False)
    found = dm.reconstruct(exposure, "maps")
    decibels, right = errors(found, batch)
    assert found.inputs.shape == batch.inputs.shape
    assert float(decibels.min()) > 60
    assert bool(right.all())
    assert "5 of them certified" in found.message


def test_the_labels_may_be_soft(batch) -> None:
    soft = 0.6 * nn.functional.one_hot(batch.targets, 10) + 0.04
    exposure = dm.observe(residual_network(1).eval(), dm.Batch(batch.inputs, soft), declare_batch_size=False)
    found = dm.reconstruct(exposure, "maps", steps=4)
    order = torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)).argmin(0)
    assert float((found.labels[order] - soft).abs().max()) < 1e-3


def test_a_batch_too_large_for_every_layer_is_refused(digits) -> None:
    images, labels = digits
    exposure = dm.observe(residual_network().eval(), dm.Batch(images[:60], labels[:60]))
    with pytest.raises(dm.Refused, match="no layer's gradient shows its maps"):
        dm.reconstruct(exposure, "maps")


def normed_network(norm: str, seed: int) -> nn.Module:
    """Convolutions, each with a norm that has statistics of its own."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 32, 1), (32, 64, 2), (64, 96, 1), (96, 96, 2), (96, 96, 1)):
            following = nn.BatchNorm2d(after) if norm == "batch" else nn.GroupNorm(4, after)
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), following, nn.ReLU()]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(96, 10)).train()


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("seed", [0, 7])
def test_norms_with_statistics_of_their_own_do_not_hide_the_batch(norm, seed, digits) -> None:
    images, labels = digits
    batch = dm.Batch(images[60 + seed : 64 + seed], labels[60 + seed : 64 + seed])
    found = dm.reconstruct(dm.observe(normed_network(norm, seed), batch, declare_batch_size=False), "maps", steps=40)
    decibels, right = errors(found, batch)
    assert float(decibels.median()) > 40
    assert bool(right.all())


def test_several_local_steps_show_no_maps(batch) -> None:
    training = TRAININGS.build("fedavg", epochs=3, learning_rate=0.01)
    exposure = dm.observe(residual_network().eval(), batch, training=training, declare_batch_size=False)
    with pytest.raises(dm.Refused, match="no layer's gradient shows its maps"):
        dm.reconstruct(exposure, "maps", steps=2)
