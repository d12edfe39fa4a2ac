"""Residual networks of ImageNet depth, with the stem of ImageNet or of CIFAR."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from torch import Tensor, nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import register_member
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import NonNegativeInt, PositiveInt

WIDTHS = (64, 128, 256, 512)
KERAS_EPSILON = 1e-3  # of batch norms


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and the shortcut."""

    expansion = 1

    def __init__(self, channels: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, width, 3, stride)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = _projection(channels, width, stride)
        self.activation = activation_layer(activation)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.activation(self.bn1(self.conv1(inputs)))
        return self.activation(self.bn2(self.conv2(maps)) + (inputs if self.downsample is None else self.downsample(inputs)))


class Bottleneck(nn.Module):
    """A 3x3 convolution between two 1x1 ones, and the shortcut; the stride is the 3x3's, as torchvision has it."""

    expansion = 4

    def __init__(self, channels: int, width: int, stride: int, activation: Activation) -> None:
        super().__init__()
        self.conv1 = _convolution(channels, width, 1)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = _convolution(width, width, 3, stride)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = _convolution(width, width * self.expansion, 1)
        self.bn3 = nn.BatchNorm2d(width * self.expansion)
        self.downsample = _projection(channels, width * self.expansion, stride)
        self.activation = activation_layer(activation)

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.activation(self.bn1(self.conv1(inputs)))
        maps = self.activation(self.bn2(self.conv2(maps)))
        return self.activation(self.bn3(self.conv3(maps)) + (inputs if self.downsample is None else self.downsample(inputs)))


Block = type[BasicBlock] | type[Bottleneck]


class ResNet(nn.Module):
    """A stem, four stages of blocks, a closing layer and the head; parameters in torchvision's order and names."""

    def __init__(
        self,
        block: Block,
        depths: tuple[int, ...],
        channels: int,
        imagenet_stem: bool,
        closing: nn.Module,
        head: nn.Linear,
        activation: Activation,
    ) -> None:
        super().__init__()
        if imagenet_stem:
            self.conv1 = nn.Conv2d(channels, WIDTHS[0], 7, stride=2, padding=3, bias=False)
        else:
            self.conv1 = _convolution(channels, WIDTHS[0], 3)
        self.bn1 = nn.BatchNorm2d(WIDTHS[0])
        self.activation = activation_layer(activation)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1) if imagenet_stem else nn.Identity()
        self.layer1 = _stage(block, WIDTHS[0], WIDTHS[0], depths[0], 1, activation)
        self.layer2 = _stage(block, WIDTHS[0] * block.expansion, WIDTHS[1], depths[1], 2, activation)
        self.layer3 = _stage(block, WIDTHS[1] * block.expansion, WIDTHS[2], depths[2], 2, activation)
        self.layer4 = _stage(block, WIDTHS[2] * block.expansion, WIDTHS[3], depths[3], 2, activation)
        self.avgpool = closing
        self.fc = head

    def forward(self, inputs: Tensor) -> Tensor:
        maps = self.maxpool(self.activation(self.bn1(self.conv1(inputs))))
        maps = self.layer4(self.layer3(self.layer2(self.layer1(maps))))
        return self.fc(self.avgpool(maps).flatten(1))


def _resnet(layers: int, block: Block, depths: tuple[int, ...]) -> Callable[..., ResNet]:
    @register_member(
        f"resnet{layers}",
        f"""ResNet-{layers}: {sum(depths)} residual blocks with batch norm, behind the 3x3 stem of CIFAR or the 7x7 one of ImageNet.

        He et al., "Deep Residual Learning for Image Recognition", CVPR 2016. Names and shapes are torchvision's, so that
        its weights load (`stem="imagenet"`). `pooling=false` hands the last maps to the head unpooled, which then has
        {WIDTHS[-1] * block.expansion} x 7 x 7 features at 224 pixels behind the ImageNet stem (RGLA's target); `pooling="convolution"`
        puts a convolution with 1x1 output in the pooling's place (GDBR's; Zhang's thesis, Section 4.5.1).
        `variant="keras"` is for weights from Keras: a bottleneck strides in its first convolution, and batch norms have ε = 1e-3.
        """,
    )
    def build(
        *,
        classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        size: PositiveInt = 32,
        stem: Literal["cifar", "imagenet"] = "cifar",
        variant: Literal["torchvision", "keras"] = "torchvision",
        pooling: bool | Literal["convolution"] = True,
        activation: Activation = "relu",
        head_bias: bool = True,
        initialisation: Initialisation = "kaiming",
        positive_layers: NonNegativeInt = 0,
    ) -> ResNet:
        features = WIDTHS[-1] * block.expansion
        side = -(-size // (32 if stem == "imagenet" else 8))  # of the last maps
        if pooling == "convolution":
            closing = nn.Sequential(nn.Conv2d(features, features, side, bias=False), activation_layer(activation))
        else:
            closing = nn.AdaptiveAvgPool2d(1) if pooling else nn.Identity()
        head = nn.Linear(features if pooling else features * side**2, classes, bias=head_bias)
        network = ResNet(block, depths, channels, stem == "imagenet", closing, head, activation)
        network = initialise(network, initialisation, positive_layers)
        return _as_keras(network) if variant == "keras" else network

    return build


def _as_keras(network: ResNet) -> ResNet:
    for module in network.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = KERAS_EPSILON
    return network


def _stage(block: Block, channels: int, width: int, depth: int, stride: int, activation: Activation) -> nn.Sequential:
    later = (block(width * block.expansion, width, 1, activation) for _ in range(depth - 1))
    return nn.Sequential(block(channels, width, stride, activation), *later)


def _convolution(channels: int, width: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(channels, width, kernel, stride=stride, padding=kernel // 2, bias=False)


def _projection(channels: int, width: int, stride: int) -> nn.Sequential | None:
    """What fits a block's input to its output where their shapes differ."""
    if stride == 1 and channels == width:
        return None
    return nn.Sequential(_convolution(channels, width, 1, stride), nn.BatchNorm2d(width))


resnet18 = _resnet(18, BasicBlock, (2, 2, 2, 2))
resnet34 = _resnet(34, BasicBlock, (3, 4, 6, 3))
resnet50 = _resnet(50, Bottleneck, (3, 4, 6, 3))
resnet101 = _resnet(101, Bottleneck, (3, 4, 23, 3))
resnet152 = _resnet(152, Bottleneck, (3, 8, 36, 3))
