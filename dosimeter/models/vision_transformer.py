"""A vision transformer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.models.transformer import DEVIATION, Block
from dosimeter.options import OptionError, PositiveInt
from dosimeter.registry import MODELS


class VisionTransformer(nn.Module):
    """Patches as tokens behind a class token, blocks with norms in front, and a head on the class token."""

    def __init__(
        self, *, classes: int, channels: int, size: int, patch: int, width: int, layers: int, heads: int, hidden: int, head_bias: bool
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(channels, width, patch, stride=patch)
        self.token = nn.Parameter(torch.randn(1, 1, width) * DEVIATION)
        self.places = nn.Parameter(torch.randn(1, (size // patch) ** 2 + 1, width) * DEVIATION)
        self.blocks = nn.ModuleList(Block(width, heads, causal=False, hidden=hidden, before=True) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, classes, bias=head_bias)

    def forward(self, images: Tensor) -> Tensor:
        """(B, channels, size, size) -> (B, classes)."""
        patches = self.patches(images).flatten(2).transpose(1, 2)  # (B, N, width)
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], 1) + self.places
        for block in self.blocks:
            tokens = block(tokens, None)
        return self.head(self.norm(tokens)[:, 0])


@MODELS.register("vit")
def vit(
    *,
    classes: PositiveInt = 10,
    channels: PositiveInt = 3,
    size: PositiveInt = 32,
    patch: PositiveInt = 4,
    width: PositiveInt = 64,
    layers: PositiveInt = 4,
    heads: PositiveInt = 4,
    hidden: PositiveInt | None = None,
    head_bias: bool = True,
) -> VisionTransformer:
    """A vision transformer: patches as tokens, learned places, a class token.

    Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021. Its ViT-B/16 is `size=224, patch=16, width=768, layers=12, heads=12`;
    the defaults are a small one for 32 pixels. `hidden` is four times `width` where it is not given.
    """
    if size % patch:
        raise OptionError("patch", f"expected a divisor of the size, {size}, got {patch}")
    if width % heads:
        raise OptionError("heads", f"expected a divisor of the width, {width}, got {heads}")
    return VisionTransformer(
        classes=classes,
        channels=channels,
        size=size,
        patch=patch,
        width=width,
        layers=layers,
        heads=heads,
        hidden=hidden or 4 * width,
        head_bias=head_bias,
    )
