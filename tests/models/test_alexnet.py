from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.functional import conv2d, max_pool2d

from dosimeter.options import OptionError
from dosimeter.registry import MODELS

LPIPS = Path(__file__).parents[3] / "shared/data/weights/lpips_alex_v0.1_full_fp32.pth"


@pytest.mark.parametrize(
    ("stem", "size", "features"), [("cifar", 16, 256), ("cifar", 32, 1024), ("imagenet", 63, 256), ("imagenet", 96, 1024)]
)
def test_the_linear_layers_receive_every_map_as_it_comes(stem: str, size: int, features: int) -> None:
    model = MODELS.build("alexnet", stem=stem, size=size, hidden=8, channels=1)
    maps = model.features(torch.rand(2, 1, size, size))
    assert maps[0].numel() == features == model.classifier[1].in_features
    assert torch.equal(model.avgpool(maps), maps)


def formula(weights: list[tuple[Tensor, Tensor]], inputs: Tensor) -> Tensor:
    """The five convolutions as the paper has them: strides 4, 1, 1, 1, 1, pooled 3x3 by 2 after the first, second and fifth."""
    maps = inputs
    for position, (weight, bias) in enumerate(weights):
        maps = conv2d(maps, weight, bias, stride=4 if position == 0 else 1, padding=(2, 2, 1, 1, 1)[position]).clamp(min=0)
        if position in (0, 1, 4):
            maps = max_pool2d(maps, 3, stride=2)
    return maps


@pytest.mark.skipif(not LPIPS.exists(), reason=f"no {LPIPS}")
def test_the_convolutions_of_torchvisions_trained_network_load() -> None:
    stored = torch.load(LPIPS, weights_only=True)
    model = MODELS.build("alexnet", stem="imagenet", size=64, hidden=8)
    weights = [(stored[f"conv{position}.weight"], stored[f"conv{position}.bias"]) for position in range(5)]
    for layer, (weight, bias) in zip((0, 3, 6, 8, 10), weights):
        model.features[layer].load_state_dict({"weight": weight, "bias": bias})
    inputs = torch.randn(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(model.features(inputs), formula(weights, inputs), rtol=1e-4, atol=1e-4)


def test_forward_is_the_formula() -> None:
    model = MODELS.build("alexnet", stem="imagenet", size=70, hidden=8)
    inputs = torch.randn(2, 3, 70, 70, generator=torch.Generator().manual_seed(0))
    values = formula([(model.features[i].weight, model.features[i].bias) for i in (0, 3, 6, 8, 10)], inputs).reshape(2, -1)
    for position in (1, 4):
        values = (values @ model.classifier[position].weight.T + model.classifier[position].bias).clamp(min=0)
    assert torch.allclose(model(inputs), values @ model.classifier[6].weight.T + model.classifier[6].bias, atol=1e-6)


def test_dropout_is_off_unless_asked_for() -> None:
    inputs = torch.rand(2, 3, 16, 16)
    still = MODELS.build("alexnet", size=16, hidden=64).train()
    assert torch.equal(still(inputs), still(inputs))
    dropping = MODELS.build("alexnet", size=16, hidden=64, dropout=0.5).train()
    assert not torch.equal(dropping(inputs), dropping(inputs))
    assert list(still.state_dict()) == list(dropping.state_dict())


def test_small_images_behind_the_imagenet_stem_are_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.size: expected at least 63 pixels"):
        MODELS.build("alexnet", stem="imagenet")
