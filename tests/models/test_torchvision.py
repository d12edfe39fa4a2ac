"""The architectures that torchvision has too: the same names, order, shapes and, on the same weights, the same outputs."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest
import torch
from torch import nn

from dosimeter.registry import MODELS

# Parameters, and the digest of the state dict's "name shape" lines, as torchvision 0.26.0 gave them at 1000 classes.
TORCHVISION = {
    "alexnet": (61_100_840, "9c198ebdae1863e4"),
    "vgg11": (132_863_336, "cb3dc23f2a13e182"),
    "vgg13": (133_047_848, "67c1dc8b57fde74b"),
    "vgg16": (138_357_544, "35c4623e0cd4a39d"),
    "vgg19": (143_667_240, "4723255af8f6c485"),
    "vgg11_bn": (132_868_840, "8b6717e727c0ecf9"),
    "vgg16_bn": (138_365_992, "347371586a8ea365"),
    "resnet18": (11_689_512, "84fb10d9c6905a1c"),
    "resnet34": (21_797_672, "28f9096d51307499"),
    "resnet50": (25_557_032, "d7e4f8bb0a536344"),
    "resnet101": (44_549_160, "02c0f34f4842751f"),
    "resnet152": (60_192_808, "685c66205bc823aa"),
    "mobilenet_v2": (3_504_872, "37bbbce8932fd0c4"),
}


def ours(name: str, size: int = 224) -> nn.Module:
    options: dict[str, Any] = {"batch_norm": name.endswith("_bn")} if name.startswith("vgg") else {"stem": "imagenet"}
    return MODELS.build(name.removesuffix("_bn"), classes=1000, size=size, **options)


@pytest.mark.parametrize("name", TORCHVISION)
def test_names_order_shapes_and_counts(name: str) -> None:
    with torch.device("meta"):
        model = ours(name)
    lines = "\n".join(f"{key} {tuple(tensor.shape)}" for key, tensor in model.state_dict().items())
    digest = hashlib.sha256(lines.encode()).hexdigest()[:16]
    assert (sum(p.numel() for p in model.parameters()), digest) == TORCHVISION[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", TORCHVISION)
def test_outputs_agree_where_torchvision_is_installed(name: str) -> None:
    torchvision = pytest.importorskip("torchvision", reason="torchvision is not installed", exc_type=ImportError)
    torch.manual_seed(1)
    reference = getattr(torchvision.models, name)(weights=None).double().train()
    inputs = torch.randn(2, 3, 224, 224, dtype=torch.float64)
    with torch.no_grad():
        for layer in reference.modules():
            if isinstance(layer, nn.BatchNorm2d):
                layer.weight.uniform_(0.5, 1.5)
                layer.bias.normal_(0, 0.1)
        reference(inputs)  # moves the running statistics off their start
        model = ours(name).double().eval()
        model.load_state_dict(reference.state_dict())
        assert torch.allclose(model(inputs), reference.eval()(inputs), rtol=1e-10, atol=1e-12)
