"""Maps before norms with statistics of their own: a fixed point finds them, and the layers around them tell their factors."""

from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.downward.pictures import descend
from dosimeter.network.tape import tensors_of

WIDTH = 96


class Block(nn.Module):
    """A residual block whose sum is known only through what follows."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.body = nn.Sequential(*layer(norm, WIDTH, 1), *layer(norm, WIDTH, 1)[:2])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.body(inputs) + inputs)


def layer(norm: str, channels: int, stride: int) -> list[nn.Module]:
    following = nn.BatchNorm2d(WIDTH) if norm == "batch" else nn.GroupNorm(4, WIDTH)
    return [nn.Conv2d(channels, WIDTH, 3, stride, 1, bias=False), following, nn.ReLU()]


def network(norm: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    body = (*layer(norm, 1, 2), Block(norm), *layer(norm, WIDTH, 1), *layer(norm, WIDTH, 1))
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))


@pytest.mark.parametrize("norm", ["batch", "group"])
@pytest.mark.parametrize("seed", [3, 11])
def test_every_map_is_that_of_a_forward_pass(norm, seed, digits) -> None:
    images, labels = digits
    model = network(norm, seed).train()
    batch = dm.Batch(images[200 + seed : 204 + seed], labels[200 + seed : 204 + seed])
    descent = descend(dm.observe(model, batch, declare_batch_size=False), layer="7")
    names = [descent.names[one.value] for one in descent.known]
    assert names[:4] == ["7", "4", "3.body.3", "3.body.0"], descent.reasons
    truth = descent.tape.run({0: batch.inputs.double()}, tensors_of(model, torch.float64), [one.value for one in descent.known])
    for one, wanted in zip(descent.known, truth):
        found, wanted = one.maps.flatten(1), wanted.flatten(1)
        order = (nn.functional.normalize(found) @ nn.functional.normalize(wanted).T).argmax(0)
        assert sorted(order.tolist()) == [0, 1, 2, 3]
        if one is not descent.lowest:  # the layer below, or the sum above, tells the factor
            assert one.freedom is None
            assert float((found[order] - wanted).norm() / wanted.norm()) < 1e-3


def test_an_update_of_another_batch_is_not_explained(digits) -> None:
    """One layer's gradient of a foreign batch: no map below it comes out."""
    images, labels = digits
    model = network("group", 3).train()
    mine, foreign = (dm.observe(model, dm.Batch(images[n : n + 4], labels[n : n + 4]), declare_batch_size=False) for n in (200, 300))
    mixed = dict(mine.update) | {"3.body.3.weight": foreign.update["3.body.3.weight"]}
    descent = descend(replace(mine, update=mixed), layer="7")
    assert [descent.names[one.value] for one in descent.known] == ["7", "4"]
    assert any("misfit" in reason for reason in descent.reasons.values())
