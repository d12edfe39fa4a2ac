from __future__ import annotations

import pytest
import torch
from torch import nn

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


def test_the_stages_are_those_of_the_papers_table() -> None:
    with torch.device("meta"):
        blocks = list(MODELS.build("mobilenet_v2", stem="imagenet").features)[1:-1]
    outputs = [block.conv[-2].out_channels for block in blocks]
    assert outputs == [16] + [24] * 2 + [32] * 3 + [64] * 4 + [96] * 3 + [160] * 3 + [320]
    assert [position for position, block in enumerate(blocks) if block.shortcut] == [2, 4, 5, 7, 8, 9, 11, 12, 14, 15]
    assert all(
        layer.groups == layer.in_channels
        for b in blocks
        for layer in b.conv.modules()
        if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3)
    )


@pytest.mark.parametrize(("stem", "size", "side"), [("imagenet", 224, 7), ("imagenet", 64, 2), ("cifar", 32, 4)])
def test_the_stems_shrink_by_32_and_by_8(stem: str, size: int, side: int) -> None:
    with torch.device("meta"):
        model = MODELS.build("mobilenet_v2", stem=stem, size=size)
        assert model.features(torch.zeros(1, 3, size, size)).shape == (1, 1280, side, side)


def test_a_block_whose_last_convolution_is_zero_passes_its_input_on() -> None:
    block = MODELS.build("mobilenet_v2").eval().features[3]
    block.conv[-2].weight.data.zero_()
    inputs = torch.randn(2, 24, 4, 4)
    assert torch.equal(block(inputs), inputs)


def test_dropout_beyond_one_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.dropout: expected a number in \[0, 1\]"):
        MODELS.build("mobilenet_v2", dropout=1.5)
