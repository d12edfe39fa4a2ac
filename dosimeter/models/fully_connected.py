"""Fully-connected networks: the papers' FCN-3, FCN-4 and six-hidden-layer MLP."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise

from torch import nn

from dosimeter.models.activations import Activation, activation_layer
from dosimeter.models.family import register_member
from dosimeter.models.initialisation import Initialisation, initialise
from dosimeter.options import NonNegativeInt, PositiveInt


def _fully_connected(name: str, default_hidden: tuple[int, ...], default_bias: bool, description: str) -> Callable[..., nn.Sequential]:
    @register_member(name, description)
    def build(
        *,
        classes: PositiveInt = 10,
        channels: PositiveInt = 3,
        size: PositiveInt = 32,
        hidden: tuple[PositiveInt, ...] = default_hidden,
        bias: bool = default_bias,
        activation: Activation = "relu",
        initialisation: Initialisation = "pytorch",
        positive_layers: NonNegativeInt = 0,
    ) -> nn.Sequential:
        layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
        for position, (width_in, width_out) in enumerate(pairwise((channels * size**2, *hidden)), start=1):
            layers[f"fc{position}"] = nn.Linear(width_in, width_out, bias=bias)
            layers[f"activation{position}"] = activation_layer(activation)
        layers[f"fc{len(hidden) + 1}"] = nn.Linear((channels * size**2, *hidden)[-1], classes, bias=bias)
        return initialise(nn.Sequential(layers), initialisation, positive_layers)

    return build


fcn3 = _fully_connected(
    "fcn3",
    (300, 300),
    True,
    """Three fully-connected layers, 784-300-300-10 on MNIST.

    Ma et al., "Instance-wise Batch Label Restoration", ICLR 2023: Appendix B; `hidden` gives the deeper ones of their Fig. 3.
    """,
)

fcn4 = _fully_connected(
    "fcn4",
    (4096, 1024, 256),
    False,
    """Four fully-connected layers without bias, 4096-1024-256 hidden units.

    Wang, Liang and He, "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks", ICLR 2024: Section 4.2.
    The paper does not give the widths; these are its released code's.
    """,
)

mlp6 = _fully_connected(
    "mlp6",
    (2048, 1024, 512, 256, 128, 64),
    True,
    """Six fully-connected hidden layers, 2048 down to 64 units, and the output layer.

    Zhang, "Unveiling the Shadows", PhD thesis, Hong Kong Polytechnic University 2025, Section 4.5.1 (GDBR). Its layers next to
    the output have weights U(0.01, 0.2) and no bias: `bias=false positive_layers=N`.
    """,
)
