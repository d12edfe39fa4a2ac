from __future__ import annotations

from pathlib import Path

import numpy
import pytest
import torch

from dosimeter.models.loading import load_model
from dosimeter.normalization import from_pixels
from dosimeter.options import OptionError
from dosimeter.registry import MODELS
from dosimeter.types import Normalization

DATA = Path(__file__).parents[3] / "shared/data"
IMAGENET = Normalization(mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("resnet8", 75_290),
        ("resnet20", 269_722),
        ("resnet32", 464_154),
        ("resnet44", 658_586),
        ("resnet56", 853_018),
        ("resnet110", 1_727_962),
    ],
)
def test_parameters_are_those_of_the_published_networks(name: str, parameters: int) -> None:
    with torch.device("meta"):
        assert sum(p.numel() for p in MODELS.build(name).parameters()) == parameters


@pytest.mark.skipif(not (DATA / "cifar10.npz").exists(), reason=f"no CIFAR-10 and no weights under {DATA}")
@pytest.mark.parametrize(
    ("name", "file", "published"),
    [("resnet20", "cifar10_resnet20-12fca82f.th", 0.917), ("resnet56", "cifar10_resnet56-4bfd9763.th", 0.930)],
)
def test_published_weights_give_their_accuracy(name: str, file: str, published: float) -> None:
    archive = numpy.load(DATA / "cifar10.npz")
    images = torch.tensor(archive["test_images"]).permute(0, 3, 1, 2).float() / 255
    model = load_model(name, {}, DATA / "weights" / file, seed=0).eval()
    with torch.no_grad():
        predicted = torch.cat([model(from_pixels(piece, IMAGENET)).argmax(1) for piece in images.split(250)])
    accuracy = float((predicted == torch.tensor(archive["test_labels"])).float().mean())
    standard_error = (published * (1 - published) / len(images)) ** 0.5  # this is a tenth of the test set
    assert abs(accuracy - published) < 2 * standard_error


def test_a_block_whose_convolutions_are_zero_subsamples_and_pads() -> None:
    block = MODELS.build("resnet20").eval().layer2[0]
    block.conv2.weight.data.zero_()
    inputs = torch.rand(2, 16, 6, 6)
    outputs = block(inputs)
    assert outputs.shape == (2, 32, 3, 3)
    assert torch.equal(outputs[:, 8:24], inputs[:, :, ::2, ::2])
    assert not outputs[:, :8].any()
    assert not outputs[:, 24:].any()


def test_a_stem_is_refused_because_there_is_only_one() -> None:
    with pytest.raises(OptionError, match=r"model: unknown option 'stem'"):
        MODELS.build("resnet20", stem="imagenet")


def test_without_pooling_the_head_takes_the_last_maps_whole() -> None:
    model = MODELS.build("resnet8", classes=7, size=32, pooling=False)
    assert model.linear.in_features == 64 * 8 * 8
    assert model(torch.rand(2, 3, 32, 32)).shape == (2, 7)
