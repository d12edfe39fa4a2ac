from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from dosimeter.data.dataset import ImageSet
from dosimeter.data.load import load_images
from dosimeter.data.readers.images import read_images
from dosimeter.options import OptionError

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"


def shared(name: str) -> Path:
    if not (SHARED / name).is_file():
        pytest.skip(f"{name} is not beside the repository, in ../shared/data")
    return SHARED / name


def pictures(images: ImageSet) -> set[bytes]:
    return {picture.numpy().tobytes() for picture in images.images}


def test_a_name_with_options() -> None:
    everything = load_images("digits")
    train, test = load_images("digits", part="train"), load_images("digits", part="test")
    assert (len(everything), len(train), len(test)) == (1797, 1438, 359)
    assert not pictures(test) & pictures(train)
    larger = load_images("digits", part="test", size=16, channels=3)
    assert larger.images.shape == (359, 3, 16, 16)
    assert torch.equal(larger.labels, test.labels)
    assert load_images("photographs", size=48, crops=5).images.shape == (50, 3, 48, 48)


def test_a_name_wins_over_a_file_and_a_path_reaches_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.savez(tmp_path / "digits.npz", images=np.zeros((3, 4, 4), np.uint8), labels=np.arange(3))
    (tmp_path / "digits.npz").rename(tmp_path / "digits")
    monkeypatch.chdir(tmp_path)
    assert len(load_images("digits")) == 1797
    assert len(load_images("./digits")) == 3
    assert len(load_images(Path("digits"))) == 3
    (tmp_path / "digits").rename(tmp_path / "mine")
    assert len(load_images("mine")) == 3


def test_the_home_folder_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    np.savez(tmp_path / "mine.npz", images=np.zeros((3, 4, 4), np.uint8), labels=np.arange(3))
    assert len(load_images("~/mine.npz")) == 3


@pytest.mark.parametrize(
    ("source", "options", "kind", "message"),
    [
        ("digit", {}, OptionError, "no data set named 'digit'; did you mean 'digits'"),
        ("no/such/folder", {}, FileNotFoundError, "^no/such/folder: no such file or folder; expected an image folder"),
        ("nothing.npz", {}, FileNotFoundError, "^nothing.npz: no such file"),
        (Path("digits"), {}, FileNotFoundError, "^digits: no such file"),
        ("digits", {"sise": 3}, OptionError, "unknown option 'sise'; did you mean 'size'"),
        ("digits", {"size": 0}, OptionError, "^size: expected a positive int, got 0"),
        ("digits", {"part": "tset"}, OptionError, "^part: expected one of 'train', 'test', 'all', got 'tset'"),
        ("digits", {"channels": 2}, ValueError, "channels: expected 1 or 3, got 2"),
        (".", {"crops": 3}, OptionError, "^crops: goes with a bundled data set, not with the images at ."),
    ],
)
def test_refusals(source: str, options: dict, kind: type[Exception], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(kind, match=message):
        load_images(source, **options)


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is empty; expected an image folder"), (b"these are words", "is of no known kind .it starts 74 68 65 73.; expected")],
)
def test_files_of_no_known_kind(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "file.bin"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: {message}"):
        read_images(path)


def test_a_missing_path() -> None:
    with pytest.raises(FileNotFoundError, match=r"^nowhere: no such file or folder"):
        read_images("nowhere")


def test_cifar10_beside_the_repository() -> None:
    path = shared("cifar10.npz")
    train, test = load_images(path, part="train"), load_images(path, part="test")
    assert (train.images.shape, test.images.shape) == ((2000, 3, 32, 32), (1000, 3, 32, 32))
    assert train.labels.bincount().tolist() == [200] * 10
    assert train.class_names[:2] == ("airplane", "automobile")
    reference = np.load(path)["test_images"][17]
    assert np.array_equal((test.images[17].permute(1, 2, 0).numpy() * 255).round(), reference)
    assert not pictures(test) & pictures(train)


def test_imagenet_photographs_beside_the_repository() -> None:
    images = load_images(shared("imagenet_photos.zip"), size=64)
    assert images.images.shape == (250, 3, 64, 64)
    assert len(images.labels.unique()) == 250
    assert images.class_names[0] == "tench"
    assert images.class_names[4] == "hammerhead"


def test_flowers_beside_the_repository() -> None:
    images = load_images(shared("flowers17.zip"), size=32)
    assert images.labels.bincount().tolist() == [5] * 17
