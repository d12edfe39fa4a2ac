"""Slopes before norms with statistics of their own: completed from open entries, up to a factor, as a true backward pass has them."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.downward.pictures import descend
from dosimeter.network.tape import tensors_of

WIDTH = 96


def network(norm: str, seed: int) -> nn.Module:
    torch.manual_seed(seed)

    def layer(channels: int, stride: int) -> list[nn.Module]:
        following = nn.BatchNorm2d(WIDTH) if norm == "batch" else nn.GroupNorm(4, WIDTH)
        return [nn.Conv2d(channels, WIDTH, 3, stride, 1, bias=False), following, nn.ReLU()]

    body = (*layer(1, 2), *layer(WIDTH, 2), *layer(WIDTH, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(WIDTH, 10))
    return nn.Sequential(*body)


@pytest.mark.parametrize(("norm", "freedom"), [("batch", "batch"), ("group", "sample")])
def test_maps_below_a_norm_come_out_up_to_a_factor(norm, freedom, digits) -> None:
    images, labels = digits
    model = network(norm, 3).train()
    batch = dm.Batch(images[200:204], labels[200:204])
    descent = descend(dm.observe(model, batch, declare_batch_size=False))
    below = [one for one in descent.known if one.freedom == freedom]
    assert below, descent.reasons
    (truth,) = descent.tape.run({0: batch.inputs.double()}, tensors_of(model, torch.float64), [below[0].value])
    found = (below[0].maps * below[0].known).flatten(1)
    wanted = (truth * below[0].known[:1]).flatten(1)
    alike = nn.functional.normalize(found) @ nn.functional.normalize(wanted).T
    assert sorted(alike.argmax(0).tolist()) == [0, 1, 2, 3]
    assert float(alike.amax(0).min()) > 1 - 1e-6
    sizes = (found.norm(dim=1) / wanted[alike.argmax(1)].norm(dim=1)).tolist()
    if freedom == "batch":
        assert max(sizes) / min(sizes) < 1 + 1e-3
