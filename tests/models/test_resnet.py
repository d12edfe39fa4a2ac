from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import batch_norm, conv2d

from dosimeter.network.probing import input_of
from dosimeter.options import OptionError
from dosimeter.registry import MODELS


@pytest.mark.parametrize(
    ("name", "stem", "size", "features"),
    [
        ("resnet50", "imagenet", 224, 2048 * 7 * 7),
        ("resnet18", "imagenet", 224, 512 * 7 * 7),
        ("resnet18", "cifar", 32, 512 * 4 * 4),
        ("resnet18", "cifar", 33, 512 * 5 * 5),
        ("resnet34", "imagenet", 40, 512 * 2 * 2),
    ],
)
def test_without_pooling_the_head_receives_every_pixel_of_the_last_maps(name: str, stem: str, size: int, features: int) -> None:
    with torch.device("meta"):
        model = MODELS.build(name, stem=stem, size=size, pooling=False)
        assert model.fc.in_features == features
        assert model(torch.zeros(1, 3, size, size)).shape == (1, 10)


def test_pooling_is_the_mean_of_what_the_unpooled_head_receives() -> None:
    torch.manual_seed(0)
    unpooled = MODELS.build("resnet18", size=16, pooling=False).eval()
    pooled = MODELS.build("resnet18", size=16).eval()
    pooled.load_state_dict({k: v for k, v in unpooled.state_dict().items() if not k.startswith("fc.")}, strict=False)
    inputs = torch.rand(2, 3, 16, 16)
    maps = input_of(unpooled, "fc", inputs).reshape(2, 512, 2, 2)
    assert torch.allclose(input_of(pooled, "fc", inputs), maps.mean((2, 3)), atol=1e-5)


def test_a_convolution_in_the_place_of_pooling_gives_one_number_a_channel() -> None:
    model = MODELS.build("resnet18", size=16, pooling="convolution", head_bias=False, positive_layers=2).eval()
    inputs = torch.rand(2, 3, 16, 16)
    maps = input_of(model, "avgpool.0", inputs)
    expected = torch.einsum("bchw,ochw->bo", maps, model.avgpool[0].weight).clamp(min=0)
    assert torch.allclose(input_of(model, "fc", inputs), expected, rtol=1e-4)
    assert model.fc.bias is None
    for weight in (model.avgpool[0].weight.detach(), model.fc.weight.detach()):
        assert 0.01 <= float(weight.min()) < float(weight.max()) <= 0.2
    assert bool((model.layer4[1].conv2.weight < 0).any())


def _normalised(layer: nn.BatchNorm2d, maps: Tensor) -> Tensor:
    return batch_norm(maps, layer.running_mean, layer.running_var, layer.weight, layer.bias)


def test_a_bottleneck_block_is_the_formula() -> None:
    torch.manual_seed(0)
    block = MODELS.build("resnet50", size=8).eval().layer2[0]
    inputs = torch.randn(2, 256, 6, 6)
    maps = _normalised(block.bn1, conv2d(inputs, block.conv1.weight)).clamp(min=0)
    maps = _normalised(block.bn2, conv2d(maps, block.conv2.weight, stride=2, padding=1)).clamp(min=0)
    maps = _normalised(block.bn3, conv2d(maps, block.conv3.weight))
    shortcut = _normalised(block.downsample[1], conv2d(inputs, block.downsample[0].weight, stride=2))
    assert torch.allclose(block(inputs), (maps + shortcut).clamp(min=0), atol=1e-5)


def test_a_block_whose_convolutions_are_zero_passes_its_input_on() -> None:
    block = MODELS.build("resnet18", size=8).eval().layer1[1]
    block.conv2.weight.data.zero_()
    inputs = torch.rand(2, 64, 5, 5)
    assert torch.equal(block(inputs), inputs)


def test_the_cifar_stem_differs_in_the_first_convolution_alone() -> None:
    with torch.device("meta"):
        cifar = {k: tuple(v.shape) for k, v in MODELS.build("resnet18").state_dict().items()}
        imagenet = {k: tuple(v.shape) for k, v in MODELS.build("resnet18", stem="imagenet").state_dict().items()}
    assert {key for key in cifar if cifar[key] != imagenet[key]} == {"conv1.weight"}
    assert (cifar["conv1.weight"], imagenet["conv1.weight"]) == ((64, 3, 3, 3), (64, 3, 7, 7))


def test_another_pooling_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.pooling: expected true or false"):
        MODELS.build("resnet18", pooling="max")
