"""LeNet-5, and the small convolutional network that gradient-leakage papers call LeNet."""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import require_size
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import NonNegativeInt, PositiveInt
from dosimeter.registry import MODELS


@MODELS.register("lenet5")
def lenet5(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    activation: Activation = "relu",
    head_bias: bool = True,
    initialisation: Initialisation = "kaiming",
    positive_layers: NonNegativeInt = 0,
) -> nn.Sequential:
    """LeNet-5: two 5x5 convolutions, each max-pooled, then 120, 84 and the classes.

    LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998, in the form of Ma et al.
    (iLRG, ICLR 2023): dense connections, ReLU and max pooling, no padding.
    """
    require_size(size, 16)
    side = ((size - 4) // 2 - 4) // 2
    network = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5),
            activation1=activation_layer(activation),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5),
            activation2=activation_layer(activation),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * side**2, 120),
            activation3=activation_layer(activation),
            fc2=nn.Linear(120, 84),
            activation4=activation_layer(activation),
            fc3=nn.Linear(84, classes, bias=head_bias),
        )
    )
    return initialise(network, initialisation, positive_layers)


@MODELS.register("lenet_dlg")
def lenet_dlg(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    activation: Activation = "sigmoid",
    head_bias: bool = True,
    initialisation: Initialisation = "uniform",
) -> nn.Sequential:
    """The LeNet of Deep Leakage from Gradients: three 5x5 convolutions of 12 channels and one linear layer.

    Zhu, Liu and Han, NeurIPS 2019, and its released code: strides 2, 2, 1 in place of pooling, sigmoid in place of
    ReLU so that second derivatives exist, weights and biases U(-0.5, 0.5). Parameter names are the code's.
    """
    side = -(-size // 4)
    body = nn.Sequential(
        nn.Conv2d(channels, 12, 5, stride=2, padding=2),
        activation_layer(activation),
        nn.Conv2d(12, 12, 5, stride=2, padding=2),
        activation_layer(activation),
        nn.Conv2d(12, 12, 5, stride=1, padding=2),
        activation_layer(activation),
    )
    head = nn.Sequential(nn.Linear(12 * side**2, classes, bias=head_bias))
    return initialise(nn.Sequential(OrderedDict(body=body, flatten=nn.Flatten(), fc=head)), initialisation)
