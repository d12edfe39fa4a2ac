from __future__ import annotations

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from dosimeter.data.readers.images import read_images

RNG = np.random.default_rng(1)
PIXELS = RNG.integers(0, 256, (10, 5, 4), np.uint8)
LABELS = (np.arange(10) % 3).astype(np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def written(folder: Path, start: str = "train", pixels: np.ndarray = PIXELS, labels: np.ndarray = LABELS, zipped: bool = False) -> Path:
    suffix, pack = (".gz", gzip.compress) if zipped else ("", bytes)
    images = folder / f"{start}-images-idx3-ubyte{suffix}"
    images.write_bytes(pack(idx(pixels)))
    (folder / f"{start}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx(labels)))
    return images


@pytest.mark.parametrize("zipped", [False, True])
def test_images_with_the_labels_beside_them(tmp_path: Path, zipped: bool) -> None:
    found = read_images(written(tmp_path, zipped=zipped))
    assert np.array_equal((found.images.numpy() * 255).round(), PIXELS[:, None])
    assert found.labels.tolist() == LABELS.tolist()
    assert found.class_names == ("0", "1", "2")


def test_plain_images_find_gzipped_labels_and_dotted_names(tmp_path: Path) -> None:
    (tmp_path / "train-images.idx3-ubyte").write_bytes(idx(PIXELS))
    (tmp_path / "train-labels.idx1-ubyte.gz").write_bytes(gzip.compress(idx(LABELS)))
    assert read_images(tmp_path / "train-images.idx3-ubyte").labels.tolist() == LABELS.tolist()


def test_a_folder_has_train_and_test_parts(tmp_path: Path) -> None:
    written(tmp_path, "train", PIXELS[:7], LABELS[:7])
    written(tmp_path, "t10k", PIXELS[7:], LABELS[7:], zipped=True)
    for part, where in (("train", slice(0, 7)), ("test", slice(7, 10)), ("all", slice(0, 10))):
        found = read_images(tmp_path, part=part)  # pyright: ignore[reportArgumentType]
        assert np.array_equal((found.images.numpy() * 255).round(), PIXELS[where, None])
        assert found.labels.tolist() == LABELS[where].tolist()


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    path = written(tmp_path)
    labels = tmp_path / "train-labels-idx1-ubyte"
    labels.write_bytes(idx(LABELS[:4]))
    with pytest.raises(ValueError, match=f"^{labels}: expected 10 labels"):
        read_images(path)
    labels.write_bytes(idx(PIXELS))
    with pytest.raises(ValueError, match=rf"^{labels}: expected an idx file of labels \(starting 00 00 08 01\), it starts 00 00 08 03"):
        read_images(path)
    labels.write_bytes(b"")
    with pytest.raises(ValueError, match=f"^{labels}: expected an idx file of labels .* empty"):
        read_images(path)
    labels.unlink()
    with pytest.raises(FileNotFoundError, match=f"^{path}: expected its labels beside it, as train-labels-idx1-ubyte"):
        read_images(path)
    nameless = tmp_path / "pixels"
    nameless.write_bytes(idx(PIXELS))
    with pytest.raises(ValueError, match=f"^{nameless}: expected 'images' in the file's name"):
        read_images(nameless)
    with pytest.raises(ValueError, match="has no test part, only train"):
        read_images(tmp_path, part="test")


@pytest.mark.parametrize("zipped", [False, True])
def test_truncated_files(tmp_path: Path, zipped: bool) -> None:
    path = written(tmp_path, zipped=zipped)
    whole = path.read_bytes()
    for length in (6, 20, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: .*truncated"):
            read_images(path)
    path.write_bytes(whole + b"x" if not zipped else gzip.compress(idx(PIXELS) + b"x"))
    with pytest.raises(ValueError, match=f"^{path}: truncated or damaged, its header promises 216 bytes for 10×5×4 values, got 217"):
        read_images(path)


def test_gzip_is_unpacked_no_further_than_its_size_allows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dosimeter.files.UNPACKED_WITHOUT_QUESTION", 10**6)
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(bytes(10**8)))
    with pytest.raises(ValueError, match=f"^{path}: .* bytes that unpack to .* are refused"):
        read_images(path)


def test_gzip_in_several_members(tmp_path: Path) -> None:
    path = written(tmp_path, zipped=True)
    whole = idx(PIXELS)
    path.write_bytes(gzip.compress(whole[:50]) + gzip.compress(whole[50:]) + bytes(8))
    assert np.array_equal((read_images(path).images.numpy()[:, 0] * 255).round(), PIXELS)


def test_a_header_with_a_zero_and_a_product_beyond_any_array_is_refused(tmp_path: Path) -> None:
    file = written(tmp_path)
    file.write_bytes(bytes((0, 0, 8, 3)) + b"\xff\xff\xff\xff" * 2 + bytes(4))
    with pytest.raises(ValueError, match="expected at least one value, its header promises 4294967295×4294967295×0"):
        read_images(file)
