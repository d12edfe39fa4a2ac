from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dosimeter.data.readers.images import read_images

RNG = np.random.default_rng(2)
PIXELS = RNG.integers(0, 256, (10, 3, 32, 32), np.uint8)
LABELS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def batch(where: slice, labels: str = "labels", keys: type = bytes, protocol: int = 2) -> bytes:
    content = {"batch_label": "x", labels: LABELS[where], "data": PIXELS[where].reshape(-1, 3072), "filenames": ["a.png"] * 2}
    if keys is bytes:
        content = {key.encode(): value for key, value in content.items()}
    return pickle.dumps(content, protocol)


# What Python 2 with an old NumPy wrote, as the original archives hold it: byte strings as str, NumPy by its former path.
PYTHON_2_BATCH = (
    b"\x80\x02}q\x01(U\x04dataq\x02cnumpy.core.multiarray\n_reconstruct\nq\x03cnumpy\nndarray\nq\x04K\x00\x85U\x01b\x87Rq\x05"
    b"(K\x01K\x01M\x00\x0c\x86cnumpy\ndtype\nq\x06U\x02u1K\x00K\x01\x87Rq\x07(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
    b"T\x00\x0c\x00\x00" + PIXELS[0].tobytes() + b"tbU\x06labelsq\x09]q\nK\x03au."
)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("keys", [bytes, str])
def test_one_batch(tmp_path: Path, protocol: int, keys: type) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(batch(slice(None), keys=keys, protocol=protocol))
    found = read_images(path)
    assert np.array_equal((found.images.numpy() * 255).round(), PIXELS)
    assert found.labels.tolist() == LABELS
    assert found.class_names == tuple("0123456789")


def test_a_batch_as_python_2_wrote_it(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(PYTHON_2_BATCH)
    found = read_images(path)
    assert np.array_equal((found.images.numpy() * 255).round(), PIXELS[:1])
    assert found.labels.tolist() == [3]


def test_a_folder_of_cifar_10(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(batch(slice(0, 4)))
    (tmp_path / "data_batch_2").write_bytes(batch(slice(4, 8)))
    (tmp_path / "test_batch").write_bytes(batch(slice(8, 10)))
    names = [f"class {number}".encode() for number in range(10)]
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": names}, 2))
    train, test = read_images(tmp_path, part="train"), read_images(tmp_path, part="test")
    assert np.array_equal((train.images.numpy() * 255).round(), PIXELS[:8])
    assert test.labels.tolist() == LABELS[8:]
    assert test.class_names[9] == "class 9"
    assert len(read_images(tmp_path)) == 10
    assert read_images(tmp_path, size=16).images.shape == (10, 3, 16, 16)


def test_a_folder_of_cifar_100_gives_fine_labels(tmp_path: Path) -> None:
    (tmp_path / "train").write_bytes(batch(slice(0, 6), "fine_labels"))
    (tmp_path / "test").write_bytes(batch(slice(6, 10), "fine_labels"))
    (tmp_path / "meta").write_bytes(pickle.dumps({"fine_label_names": list("abcdefghij"), "coarse_label_names": ["z"]}))
    found = read_images(tmp_path, part="test")
    assert found.labels.tolist() == LABELS[6:]
    assert found.class_names == tuple("abcdefghij")


class Runs:
    """Unpickling this calls `function(*arguments)`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.reduced = (function, arguments)

    def __reduce__(self) -> Any:
        return self.reduced


@pytest.mark.parametrize("protocol", range(2, 6))
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    path, trace = tmp_path / "data_batch_1", tmp_path / "it ran"
    path.write_bytes(pickle.dumps({b"data": PIXELS[:1].reshape(1, 3072), b"labels": Runs(os.system, f"touch '{trace}'")}, protocol))
    with pytest.raises(ValueError, match=f"^{path}: not a CIFAR batch, its pickle asks for posix.system, which could run code; nothing"):
        read_images(path)
    assert not trace.exists()
    pickle.loads(path.read_bytes())
    assert trace.exists(), "the trap must be one that an ordinary unpickler springs"


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(pickle.dumps(Runs(eval, "1"), 2), id="eval"),
        pytest.param(pickle.dumps(Runs(getattr, "a", "upper"), 2), id="getattr"),
        pytest.param(pickle.dumps(Runs(np.load, "x.npy"), 2), id="another function of NumPy"),
        pytest.param(b"\x80\x04\x8c\x05numpy\x8c\x0endarray.tofile\x93.", id="a dotted way through an admitted name"),
        pytest.param(b"\x80\x02cnumpy.testing._private.utils\nrunstring\n.", id="runstring"),
        pytest.param(b"\x80\x02(cposix\nsystem\nos\x85R.", id="old-style instance"),
        pytest.param(b"\x80\x02(S'true'\niposix\nsystem\n.", id="INST opcode"),
        pytest.param(pickle.dumps({b"data": np.array([{}], dtype=object)}, 2), id="an array of objects"),
        pytest.param(b"\x80\x02c_codecs\nencode\n(X\x01\x00\x00\x00aX\x05\x00\x00\x00rot13tR.", id="another codec"),
    ],
)
def test_nothing_but_arrays_is_admitted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: not a CIFAR batch, its pickle asks for "):
        read_images(path)


def test_a_malicious_names_file_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(batch(slice(None)))
    (tmp_path / "batches.meta").write_bytes(pickle.dumps({b"label_names": Runs(os.system, "true")}, 2))
    with pytest.raises(ValueError, match=r"its pickle asks for posix.system"):
        read_images(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "expected a CIFAR python batch .a dictionary., got list"),
        ({"labels": [1]}, "expected a CIFAR batch with 'data' of N×3072 bytes, got keys"),
        ({"data": np.zeros((2, 100), np.uint8), "labels": [0, 1]}, r"got uint8 \(2, 100\)"),
        ({"data": np.zeros((2, 3072)), "labels": [0, 1]}, r"got float64 \(2, 3072\)"),
        ({"data": np.zeros((2, 3072), np.uint8)}, "expected a CIFAR batch with 'labels' or 'fine_labels'"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": [0]}, "expected 2 labels, one for each image"),
        ({"data": np.zeros((2, 3072), np.uint8), "labels": ["a", "b"]}, "expected class ids as integers"),
        ({"data": np.zeros((0, 3072), np.uint8), "labels": np.zeros(0, np.int64)}, "expected at least one image"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps(content, 4))
    with pytest.raises(ValueError, match=message) as error:
        read_images(path)
    assert str(path) in str(error.value)


def test_truncated_batches(tmp_path: Path) -> None:
    path = tmp_path / "data_batch_1"
    whole = batch(slice(None))
    for length in (1, 2, 10, 200, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: expected a CIFAR python batch, but it is damaged or truncated"):
            read_images(path)


@pytest.mark.parametrize("protocol", [2, 5])
@pytest.mark.parametrize("kind", ["<i8", ">i8", ">i4", ">u2", "|u1"])
def test_labels_in_any_byte_order(tmp_path: Path, kind: str, protocol: int) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": PIXELS.reshape(-1, 3072), "labels": np.array(LABELS).astype(kind)}, protocol))
    assert read_images(path).labels.tolist() == LABELS


TUPLES = b"\x80\x02}K\x01\x85q\x00" + b"h\x00\x86q\x00" * 40 + b"K\x01s."  # a key that holds itself 2^40 times


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\x80\x02}r\xff\xff\xff\x7f.", id="a place that takes 16 GB"),
        pytest.param(b"\x80\x02cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\nJ\x00\x00\x00\x70\x85U\x01btR.", id="a huge shape"),
        pytest.param(b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.", id="bytes that are not there"),
        pytest.param(TUPLES, id="tuples of tuples"),
        pytest.param(b"\x80\x02}]q\x00" + b"(h\x00h\x00lq\x00" * 40 + b"s.", id="lists of lists"),
    ],
)
def test_a_few_bytes_do_not_take_memory_or_time(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data_batch_1"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{path}: expected a CIFAR python batch"):
        read_images(path)


def test_a_nested_list_of_labels_is_not_unfolded(tmp_path: Path) -> None:
    labels: list[Any] = [1]
    for _ in range(40):
        labels = [labels, labels]
    path = tmp_path / "data_batch_1"
    path.write_bytes(pickle.dumps({"data": PIXELS[:1].reshape(1, 3072), "labels": labels}, 2))
    with pytest.raises(ValueError, match="labels: expected class ids as integers"):
        read_images(path)
