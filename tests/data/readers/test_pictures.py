from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from dosimeter.data.dataset import ImageSet
from dosimeter.data.readers.images import read_images

Writer = Callable[[Path, Mapping[str, bytes]], Path]


def picture(level: int, shape: tuple[int, ...] = (4, 4, 3)) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.full(shape, level, np.uint8)).save(buffer, "PNG")
    return buffer.getvalue()


def as_folder(where: Path, files: Mapping[str, bytes]) -> Path:
    root = where / "set"
    root.mkdir()
    for name, data in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data)
    return root


def as_zip(where: Path, files: Mapping[str, bytes]) -> Path:
    path = where / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return path


def levels(images: ImageSet) -> list[int]:
    assert bool(((images.images.flatten(1) - images.images[:, :1, 0, 0]).abs() < 1e-6).all()), "a picture is of one level"
    return (images.images[:, 0, 0, 0] * 255).round().long().tolist()


@pytest.fixture(params=[as_folder, as_zip], ids=["folder", "zip"])
def write(request: pytest.FixtureRequest) -> Writer:
    return request.param


def test_one_folder_a_class(tmp_path: Path, write: Writer) -> None:
    files = {"dog/1.png": picture(10), "cat/2.PNG": picture(20), "cat/1.png": picture(30), "bird/deep/er.png": picture(40)}
    found = read_images(write(tmp_path, files | {"cat/notes.txt": b"words", ".hidden/x.png": b"?", "__MACOSX/cat/._1.png": b"?"}))
    assert found.class_names == ("bird", "cat", "dog")
    assert list(zip(levels(found), found.labels.tolist())) == [(40, 0), (30, 1), (20, 1), (10, 2)]
    assert found.name == "set"


def test_folders_around_everything_are_looked_through(tmp_path: Path, write: Writer) -> None:
    found = read_images(write(tmp_path, {"download/set/b/1.png": picture(1), "download/set/a/1.png": picture(2)}))
    assert found.class_names == ("a", "b")
    assert levels(found) == [2, 1]


def test_loose_images_are_one_class(tmp_path: Path, write: Writer) -> None:
    found = read_images(write(tmp_path, {"b.png": picture(2), "a.png": picture(1)}))
    assert found.class_names == ("unlabelled",)
    assert (levels(found), found.labels.tolist()) == ([1, 2], [0, 0])


def test_a_single_class_folder_keeps_its_name(tmp_path: Path, write: Writer) -> None:
    assert read_images(write(tmp_path, {"cat/b.png": picture(2), "cat/a.png": picture(1)})).class_names == ("cat",)


def test_train_and_test_folders_are_parts_with_the_same_classes(tmp_path: Path, write: Writer) -> None:
    files = {"train/a/1.png": picture(1), "train/c/1.png": picture(2), "val/b/1.png": picture(3), "val/c/1.png": picture(4)}
    path = write(tmp_path, files)
    train, test, everything = (read_images(path, part=part) for part in ("train", "test", "all"))
    assert train.class_names == test.class_names == ("a", "b", "c")
    assert (levels(train), train.labels.tolist()) == ([1, 2], [0, 2])
    assert (levels(test), test.labels.tolist()) == ([3, 4], [1, 2])
    assert sorted(levels(everything)) == [1, 2, 3, 4]


def test_without_parts_a_fixed_fifth_of_each_class_is_for_testing(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path, {f"{name}/{k}.png": picture(10 * k + n) for n, name in enumerate("ab") for k in range(10)})
    train, test = read_images(path, part="train"), read_images(path, part="test")
    assert test.labels.bincount().tolist() == [2, 2]
    assert len(set(levels(train)) | set(levels(test))) == 20


def test_a_manifest_gives_class_ids_and_names(tmp_path: Path, write: Writer) -> None:
    manifest = [
        {"file": "x.png", "index": 5, "label": "five"},
        {"file": "photos/y.png", "index": 2, "label": "two"},
        {"file": "x.png", "index": 5, "label": "five"},
    ]
    files = {"photos/x.png": picture(50), "photos/y.png": picture(20), "photos/unlisted.png": picture(99)}
    found = read_images(write(tmp_path, files | {"manifest.json": json.dumps(manifest).encode()}))
    assert list(zip(levels(found), found.labels.tolist())) == [(50, 5), (20, 2), (50, 5)]
    assert found.class_names == ("0", "1", "two", "3", "4", "five")


def test_a_manifest_of_numbers_and_one_of_words(tmp_path: Path) -> None:
    files = {"x.png": picture(1), "y.png": picture(2)}
    for n, (first, second, ids, names) in enumerate([(1, 0, [1, 0], ("0", "1")), ("dog", "cat", [1, 0], ("cat", "dog"))]):
        manifest = [{"file": "x.png", "label": first}, {"file": "y.png", "label": second}]
        (tmp_path / str(n)).mkdir()
        found = read_images(as_zip(tmp_path / str(n), files | {"manifest.json": json.dumps(manifest).encode()}))
        assert (found.labels.tolist(), found.class_names) == (ids, names)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (b"{not json", "manifest.json: expected JSON"),
        (b"[]", "manifest.json: expected a list of objects"),
        (b'{"file": "x.png"}', "manifest.json: expected a list of objects"),
        (b'[{"file": ["x.png"], "label": 0}]', "manifest.json: expected a list of objects"),
        (b'[{"file": "gone.png", "label": 0}]', "manifest.json: names 'gone.png', which is not there .1 such of 1."),
        (b'[{"file": "same.png", "label": 0}]', "manifest.json: names 'same.png', which is not there"),  # there are two
        (b'[{"file": "x.png"}]', "manifest.json: expected every 'index' or 'label' to be an integer"),
        (b'[{"file": "x.png", "label": -1}]', "manifest.json: expected every 'index' or 'label' to be an integer"),
        (b'[{"file": "x.png", "label": true}]', "manifest.json: expected every 'index' or 'label' to be an integer"),
    ],
)
def test_a_manifest_that_does_not_fit(tmp_path: Path, write: Writer, manifest: bytes, message: str) -> None:
    path = write(tmp_path, {"x.png": picture(1), "a/same.png": picture(1), "b/same.png": picture(2), "manifest.json": manifest})
    with pytest.raises(ValueError, match=message) as error:
        read_images(path)
    assert str(path) in str(error.value)


def test_sizes_and_colours(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path, {"a/1.png": picture(7, (4, 8, 3)), "a/2.png": picture(8, (6, 6))})
    with pytest.raises(ValueError, match="differ in size"):
        read_images(path)
    found = read_images(path, size=4)
    assert found.images.shape == (2, 3, 4, 4)
    assert levels(found) == [7, 8]
    assert read_images(path, size=4, channels=1).images.shape == (2, 1, 4, 4)


def test_gray_stays_gray(tmp_path: Path, write: Writer) -> None:
    assert read_images(write(tmp_path, {"1.png": picture(8, (6, 6))})).images.shape == (1, 1, 6, 6)


def test_what_is_wrong_is_named(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path, {"cat/1.png": picture(1), "cat/2.png": picture(1)[:40]})
    with pytest.raises(ValueError, match=f"^{path}: cat/2.png: cannot be read as an image"):
        read_images(path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"notes.txt": b"words"}, "expected images .*, found none among its 1 files"),
        ({"cat/1.png": picture(1), "2.png": picture(1)}, "expected one folder for each class, but 1 images lie beside the class folders"),
        ({}, "empty folder|found none among its 0 files"),
    ],
)
def test_layouts_that_make_no_sense(tmp_path: Path, write: Writer, files: Mapping[str, bytes], message: str) -> None:
    path = write(tmp_path, files)
    with pytest.raises(ValueError, match=message) as error:
        read_images(path)
    assert str(error.value).startswith(str(path))


@pytest.mark.parametrize("name", ["../outside.png", "/etc/outside.png", "a/../../outside.png", "..\\outside.png", "C:/outside.png"])
def test_names_that_point_outside_the_archive_are_refused_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    path = as_zip(tmp_path, {"a/1.png": picture(1), name: picture(2)})
    with pytest.raises(ValueError, match="points outside the archive"):
        read_images(path)
    assert list(tmp_path.iterdir()) == [path]


def test_reading_a_zip_writes_nothing(tmp_path: Path) -> None:
    path = as_zip(tmp_path, {"a/1.png": picture(1)})
    read_images(path)
    assert list(tmp_path.iterdir()) == [path]


def test_a_decompression_bomb_is_refused_by_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dosimeter.files.UNPACKED_WITHOUT_QUESTION", 1000)
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.png", bytes(10**6))
    with pytest.raises(ValueError, match=r"a/1.png: .* bytes that unpack to 1 MB are refused; .*DOSIMETER_TRUST_DATA"):
        read_images(path)


def test_a_picture_with_too_many_pixels_is_refused_before_it_is_decoded(tmp_path: Path, write: Writer) -> None:
    content = io.BytesIO()
    Image.new("1", (8192, 8192)).save(content, "PNG")
    path = write(tmp_path, {"a/1.png": content.getvalue()})
    with pytest.raises(ValueError, match=r"a/1.png: .*8192×8192 pixels are more than the 33554432 allowed"):
        read_images(path)


def test_many_pictures_that_unpack_to_too_much_are_refused(tmp_path: Path, write: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dosimeter.files.UNPACKED_WITHOUT_QUESTION", 10**6)
    content = io.BytesIO()
    Image.new("L", (300, 300)).save(content, "PNG")
    path = write(tmp_path, {f"a/{number}.png": content.getvalue() for number in range(4)})
    with pytest.raises(ValueError, match=r"bytes that unpack to 1.08 MB are refused"):
        read_images(path)
    assert len(read_images(path, size=8)) == 4  # resized one by one, they fit


def test_a_class_id_beyond_the_limit_is_refused_before_a_name_is_made_for_each(tmp_path: Path, write: Writer) -> None:
    manifest = json.dumps([{"file": "1.png", "index": 10**9}]).encode()
    path = write(tmp_path, {"1.png": picture(1), "manifest.json": manifest})
    with pytest.raises(ValueError, match=r"manifest.json: expected class ids up to 131071, got 1000000000"):
        read_images(path)


def test_a_nested_manifest_is_one_sentence(tmp_path: Path, write: Writer) -> None:
    path = write(tmp_path, {"1.png": picture(1), "manifest.json": b"[" * 10**5})
    with pytest.raises(ValueError, match=r"manifest.json: expected JSON"):
        read_images(path)


@pytest.mark.parametrize("name", [".", ""])
def test_members_without_a_name_are_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "set.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(zipfile.ZipInfo("a/1.png"), picture(1))
        archive.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(ValueError, match=f"^{path}: holds .* points outside the archive"):
        read_images(path)


def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ValueError, match="pipe: expected a file, got a pipe"):
        read_images(tmp_path / "pipe")


def test_damaged_archives(tmp_path: Path) -> None:
    noise = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)).save(noise, "PNG")
    path = as_zip(tmp_path, {"a/1.png": noise.getvalue(), "b/1.png": picture(1)})
    whole = path.read_bytes()
    for length in (4, 60, len(whole) - 4):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^{path}: expected a zip archive, but it is damaged or truncated"):
            read_images(path)
    corrupt = bytearray(whole)
    corrupt[60:400] = bytes(340)
    path.write_bytes(corrupt)
    with pytest.raises(ValueError, match=f"^{path}: "):
        read_images(path)
