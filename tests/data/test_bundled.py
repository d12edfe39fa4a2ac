from __future__ import annotations

import builtins
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dosimeter.data.bundled import packaged_file
from dosimeter.data.dataset import ImageSet, select, stratified_mask
from dosimeter.data.photographs import DISTRIBUTIONS, PHOTOGRAPHS
from dosimeter.options import OptionError
from dosimeter.randomness import generator
from dosimeter.registry import DATASETS


def test_digits_are_scikit_learns() -> None:
    from sklearn.datasets import load_digits

    reference = load_digits()
    images = DATASETS.build("digits")
    assert np.array_equal(images.images[:, 0].numpy() * 16, reference["images"])
    assert np.array_equal(images.labels.numpy(), reference["target"])
    larger = DATASETS.build("digits", size=32)
    assert larger.images.shape == (1797, 1, 32, 32)
    assert torch.allclose(larger.images.mean(), images.images.mean(), atol=0.01)


def test_faces_are_scikit_images() -> None:
    from skimage.data import lfw_subset

    images = DATASETS.build("faces")
    assert np.allclose(images.images[:, 0].numpy(), lfw_subset(), atol=1e-7)
    assert images.labels.tolist() == [1] * 100 + [0] * 100
    assert images.class_names[1] == "face"


def test_photographs_are_squares_that_share_no_pixel() -> None:
    """The finest grid that size 32 allows needs no resizing: every crop is found in its photograph, each in a place of its own."""
    from skimage.data import chelsea

    images = DATASETS.build("photographs", size=32, crops=126)
    photograph = chelsea()  # 300×451: 9×14 squares
    crops = (images.images[images.labels == images.class_names.index("cat")] * 255).round().byte().permute(0, 2, 3, 1).numpy()
    squares = {photograph[y : y + 32, x : x + 32].tobytes(): (y, x) for y in range(0, 288, 32) for x in range(0, 448, 32)}
    assert [squares[crop.tobytes()] for crop in crops] == sorted(squares.values())


@pytest.fixture(scope="module")
def photographs() -> ImageSet:
    return DATASETS.build("photographs")


def test_photographs_at_their_defaults(photographs: ImageSet) -> None:
    images = photographs
    assert torch.bincount(images.labels).tolist() == [64] * 10
    assert images.class_names == tuple(PHOTOGRAPHS)
    assert bool((images.images.flatten(1).std(dim=1) > 0.005).all()), "a crop shows nothing"
    assert len({picture.numpy().tobytes() for picture in images.images}) == 640
    assert torch.equal(DATASETS.build("photographs").images, images.images)


def test_photographs_of_any_size() -> None:
    images = DATASETS.build("photographs", size=128)
    assert images.images.shape == (60, 3, 128, 128)  # the cat's photograph gives six squares of 128
    with pytest.raises(OptionError, match=r"data_set\.crops: .* at most 28 of 64 pixels"):
        DATASETS.build("photographs", size=64, crops=100)
    with pytest.raises(OptionError, match=r"data_set\.size: .* at most 0 of 400"):
        DATASETS.build("photographs", size=400)


def test_the_photographs_can_be_told_apart(photographs: ImageSet) -> None:
    """The set is worth training on: its labels follow from the crops' colours alone far above the 10 % of guessing."""
    chosen = stratified_mask(photographs.labels, 480, generator(11, "known"))
    parts = [select(photographs, mask) for mask in (chosen, ~chosen)]
    known, new = (torch.cat([part.images.mean((2, 3)), part.images.std((2, 3))], dim=1) for part in parts)  # (N, 6)
    nearest = torch.cdist(new, known).argmin(dim=1)
    assert (parts[0].labels[nearest] == parts[1].labels).double().mean() > 0.6


def test_packages_are_not_imported_to_read_their_images(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = builtins.__import__

    def watched(name: str, *arguments: Any, **options: Any) -> Any:
        assert name.partition(".")[0] not in ("sklearn", "skimage", "pooch", "torchvision"), name
        return honest(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", watched)
    assert [len(DATASETS.build(name)) for name in ("digits", "faces")] == [1797, 200]
    assert len(DATASETS.build("photographs", size=128, crops=1)) == 10


def test_a_file_that_is_not_on_disk() -> None:
    with pytest.raises(FileNotFoundError, match="comes with the package scikit-image"):
        packaged_file("skimage", "data/nothing.png", "scikit-image")
    with pytest.raises(FileNotFoundError, match="no_such_package/x is not on disk"):
        packaged_file("no_such_package", "x", "no-such-package")


def test_the_guide_says_whose_each_photograph_is() -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "guide" / "bundled-images.md").read_text(encoding="utf-8")
    for name, (package, file) in PHOTOGRAPHS.items():
        assert f"| `{name}` | {DISTRIBUTIONS[package]}, `{Path(file).name}` | " in page
    assert all(f"## {name}\n" in page for name in DATASETS)
