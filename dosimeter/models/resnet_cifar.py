"""The thin residual networks that He et al. designed for CIFAR-10."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.nn.functional import pad

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import register_member
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import PositiveInt

WIDTHS = (16, 32, 64)


class PlainBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut without parameters (option A)."""

    def __init__(self, channels: int, width: int, activation: Activation) -> None:
        super().__init__()
        stride = 1 if channels == width else 2
        self.conv1 = nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.activation = activation_layer(activation)
        self.stride, self.padding = stride, (width - channels) // 2

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.bn2(self.conv2(self.activation(self.bn1(self.conv1(inputs)))))
        # Every second pixel, and as many empty channels below as above.
        shortcut = pad(inputs[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, self.padding, self.padding))
        return self.activation(maps + shortcut)


class CifarResNet(nn.Module):
    """A 3x3 stem, three stages of blocks, global pooling and the head; names as in akamaster/pytorch_resnet_cifar10."""

    def __init__(
        self, channels: int, blocks: int, classes: int, activation: Activation, head_bias: bool, unpooled_side: int | None = None
    ) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.activation = activation_layer(activation)
        self.layer1 = _stage(WIDTHS[0], WIDTHS[0], blocks, activation)
        self.layer2 = _stage(WIDTHS[0], WIDTHS[1], blocks, activation)
        self.layer3 = _stage(WIDTHS[1], WIDTHS[2], blocks, activation)
        self.pool = nn.AdaptiveAvgPool2d(1) if unpooled_side is None else nn.Identity()
        self.linear = nn.Linear(WIDTHS[2] * (unpooled_side or 1) ** 2, classes, bias=head_bias)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.activation(self.bn1(self.conv1(inputs)))
        maps = self.layer3(self.layer2(self.layer1(maps)))
        return self.linear(self.pool(maps).flatten(1))


def _stage(channels: int, width: int, blocks: int, activation: Activation) -> nn.Sequential:
    return nn.Sequential(PlainBlock(channels, width, activation), *(PlainBlock(width, width, activation) for _ in range(blocks - 1)))


def _cifar_resnet(layers: int) -> Callable[..., CifarResNet]:
    @register_member(
        f"resnet{layers}",
        f"""CIFAR ResNet-{layers}: three stages of {(layers - 2) // 6} thin residual blocks, 64 features.

        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016: Section 4.2, with its parameter-free shortcuts.
        The weights of akamaster/pytorch_resnet_cifar10 load; they expect ImageNet's mean and standard deviation.
        `pooling=false` hands the last maps to the head unpooled.
        """,
    )
    def build(
        *,
        classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        size: PositiveInt = 32,
        pooling: bool = True,
        activation: Activation = "relu",
        head_bias: bool = True,
        initialisation: Initialisation = "kaiming_fan_in",
    ) -> CifarResNet:
        unpooled_side = None if pooling else -(-size // 4)  # of the last maps
        network = CifarResNet(channels, (layers - 2) // 6, classes, activation, head_bias, unpooled_side)
        return initialise(network, initialisation)

    return build


resnet8 = _cifar_resnet(8)
resnet20 = _cifar_resnet(20)
resnet32 = _cifar_resnet(32)
resnet44 = _cifar_resnet(44)
resnet56 = _cifar_resnet(56)
resnet110 = _cifar_resnet(110)
