"""Foreign files: regular files only, and bounds before anything is unpacked."""

import gzip
import os

import pytest

from dosimeter import files


def test_gzip_members_are_unpacked_one_after_the_other_and_padding_is_ignored():
    packed = gzip.compress(b"one") + gzip.compress(b"two") + b"\0\0"
    assert files.gunzip(packed, "data") == b"onetwo"
    with pytest.raises(EOFError, match="end too early"):
        files.gunzip(packed[:-8], "data")


def test_what_unpacks_too_far_is_refused_unless_trusted(monkeypatch):
    monkeypatch.setattr(files, "UNPACKED_WITHOUT_QUESTION", 1000)
    bomb = gzip.compress(bytes(100_000))
    with pytest.raises(ValueError, match=r"data: .* are refused; .*DOSIMETER_TRUST_DATA=1"):
        files.gunzip(bomb, "data")
    monkeypatch.setenv("DOSIMETER_TRUST_DATA", "1")
    assert len(files.gunzip(bomb, "data")) == 100_000


def test_bounds_hold_to_the_last_value():
    files.check_class_id(files.LARGEST_CLASS_ID, "labels")
    files.check_picture(files.LARGEST_PICTURE, 1)
    with pytest.raises(ValueError, match="got 131072"):
        files.check_class_id(files.LARGEST_CLASS_ID + 1, "labels")
    with pytest.raises(ValueError, match="more than the 33554432 allowed"):
        files.check_picture(files.LARGEST_PICTURE + 1, 1)


def test_only_regular_files_are_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder"), ("/dev/null", "a device")):
        with pytest.raises(ValueError, match=f"expected a file, got {kind}"):
            files.read_file(path)
    with pytest.raises(ValueError, match="zero byte"):
        files.read_file("a\0b")


def test_sizes_in_words():
    assert [files.readable_size(count) for count in (12, 3.2e9, 5e13)] == ["12 bytes", "3.2 GB", "50 TB"]


def test_a_mark_of_the_encoding_is_no_part_of_a_text(tmp_path):
    (tmp_path / "a.toml").write_bytes(b"\xef\xbb\xbfseed = 3\n")
    assert files.read_text(tmp_path / "a.toml") == "seed = 3\n"
