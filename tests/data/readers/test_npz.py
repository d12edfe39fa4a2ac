from __future__ import annotations

import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from dosimeter.data.readers.images import read_images

RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (12, 6, 6, 3), np.uint8)
LABELS = np.arange(12) % 4


def saved(folder: Path, **arrays: np.ndarray) -> Path:
    path = folder / "set.npz"
    np.savez(path, **arrays)  # pyright: ignore[reportArgumentType]
    return path


@pytest.mark.parametrize(
    "images",
    [PIXELS, np.moveaxis(PIXELS, 3, 1), PIXELS / 255, (PIXELS / 255).astype(np.float32), PIXELS.astype(np.int32)],
    ids=["channels last", "channels first", "float64", "float32", "int32"],
)
def test_every_layout_gives_the_same_images(tmp_path: Path, images: np.ndarray) -> None:
    found = read_images(saved(tmp_path, images=images, labels=LABELS))
    assert np.array_equal((found.images.numpy() * 255).round(), np.moveaxis(PIXELS, 3, 1))
    assert found.labels.tolist() == LABELS.tolist()
    assert found.class_names == ("0", "1", "2", "3")
    assert found.name == "set"


def test_gray_images_labels_in_a_column_and_class_names(tmp_path: Path) -> None:
    path = saved(tmp_path, images=PIXELS[..., 0], labels=LABELS[:, None].astype(np.uint8), class_names=np.array(["a", "b", "c", "d", "e"]))
    found = read_images(path)
    assert np.array_equal((found.images.numpy() * 255).round(), PIXELS[:, None, :, :, 0])
    assert found.labels.tolist() == LABELS.tolist()
    assert found.class_names == ("a", "b", "c", "d", "e")
    assert read_images(path, channels=3, size=3).images.shape == (12, 3, 3, 3)


def test_parts_of_its_own(tmp_path: Path) -> None:
    path = saved(tmp_path, train_images=PIXELS[:8], train_labels=LABELS[:8], test_images=PIXELS[8:], test_labels=LABELS[8:])
    train, test, everything = (read_images(path, part=part) for part in ("train", "test", "all"))
    assert np.array_equal((train.images.numpy() * 255).round(), np.moveaxis(PIXELS[:8], 3, 1))
    assert np.array_equal((test.images.numpy() * 255).round(), np.moveaxis(PIXELS[8:], 3, 1))
    assert torch.equal(everything.images, torch.cat([train.images, test.images]))
    assert torch.equal(everything.labels, torch.cat([train.labels, test.labels]))


def test_without_parts_a_fixed_fifth_is_for_testing(tmp_path: Path) -> None:
    path = saved(tmp_path, images=PIXELS, labels=LABELS)
    assert (len(read_images(path, part="train")), len(read_images(path, part="test"))) == (10, 2)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": PIXELS}, "expected an array 'labels', found images"),
        ({"pixels": PIXELS}, "expected an array 'images', found pixels"),
        ({"train_images": PIXELS}, "expected an array 'train_labels', found train_images"),
        ({"images": PIXELS, "labels": LABELS[:5]}, r"labels: expected 12 labels, one for each image, got shape \(5,\)"),
        ({"images": PIXELS, "labels": LABELS / 2}, "labels: expected class ids as integers, got float64"),
        ({"images": PIXELS, "labels": LABELS - 1}, "labels: expected class ids of at least 0, got -1"),
        ({"images": PIXELS[:, 0, 0], "labels": LABELS}, "images: expected images as N×H×W"),
        ({"images": PIXELS / 1.0, "labels": LABELS}, r"images: expected pixels as floats in \[0, 1\]"),
        ({"images": PIXELS[:0], "labels": LABELS[:0]}, "expected at least one image"),
        ({"images": PIXELS, "labels": LABELS, "class_names": np.array(["a"])}, r"class ids must lie in 0\.\.0, got 0\.\.3"),
        ({"images": np.array([{}] * 12, dtype=object), "labels": LABELS}, "array 'images' cannot be read .it holds object"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, arrays: dict, message: str) -> None:
    path = saved(tmp_path, **arrays)
    with pytest.raises(ValueError, match=message) as error:
        read_images(path)
    assert str(path) in str(error.value)


def test_parts_of_different_shape_must_be_asked_for_one_by_one(tmp_path: Path) -> None:
    small = PIXELS[:, :4, :4]
    path = saved(tmp_path, train_images=PIXELS, train_labels=LABELS, test_images=small, test_labels=LABELS)
    with pytest.raises(ValueError, match="differ in image shape; ask for one part"):
        read_images(path)
    assert read_images(path, size=4).images.shape == (24, 3, 4, 4)


def test_truncated_anywhere_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, images=PIXELS, labels=LABELS)
    whole = path.read_bytes()
    for length in (4, 100, len(whole) // 2, len(whole) - 5):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: expected a NumPy .npz archive, but it is damaged or truncated"):
            read_images(path)
    corrupt = bytearray(whole)
    corrupt[200:240] = bytes(40)
    path.write_bytes(corrupt)
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_images(path)


def test_labels_beyond_the_limit_are_refused(tmp_path: Path) -> None:
    path = saved(tmp_path, images=PIXELS, labels=LABELS + 2**31)
    with pytest.raises(ValueError, match=r"labels: expected class ids up to 131071, got 2147483651"):
        read_images(path)


@pytest.mark.parametrize("shape", ["(70368744177664,)", "(-1, 2)", "(10**9,)", "(4, 4, 4, 10000000000)"])
def test_a_header_that_promises_more_than_follows_allocates_nothing(tmp_path: Path, shape: str) -> None:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}}}".encode()
    path = tmp_path / "set.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"1234")
    with pytest.raises(ValueError, match=f"^{path}: array 'images' cannot be read"):
        read_images(path)


def test_an_archive_that_unpacks_to_too_much_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "set.npz"
    np.savez_compressed(path, images=np.zeros((70, 1000, 1000), np.uint8), labels=np.zeros(70, np.int64))
    with pytest.raises(ValueError, match=f"^{path}: .* bytes that unpack to 280 MB are refused"):
        read_images(path)


def test_arrays_in_fortran_order_and_big_endian_labels(tmp_path: Path) -> None:
    found = read_images(saved(tmp_path, images=np.asfortranarray(PIXELS), labels=LABELS.astype(">i4")))
    assert np.array_equal((found.images.numpy() * 255).round(), np.moveaxis(PIXELS, 3, 1))
    assert found.labels.tolist() == LABELS.tolist()
