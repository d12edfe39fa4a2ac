from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image

from dosimeter.data.pixels import channels_first, decode, scale_pixels


def encoded(array: np.ndarray, kind: str = "PNG", **options: object) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(array).save(buffer, kind, **options)
    return buffer.getvalue()


def test_scaled_by_type() -> None:
    assert scale_pixels(np.array([0, 51, 255], np.uint8), "x").tolist() == pytest.approx([0, 0.2, 1])
    assert scale_pixels(np.array([0, 51, 255], np.int64), "x").tolist() == pytest.approx([0, 0.2, 1])
    assert scale_pixels(np.array([0, 0.2, 1]), "x").tolist() == pytest.approx([0, 0.2, 1])
    assert scale_pixels(np.array([False, True]), "x").tolist() == [0, 1]
    assert scale_pixels(np.array([0.5]), "x").dtype == torch.float32


def test_scaled_never_shares_memory() -> None:
    array = np.zeros(3, np.float32)
    pixels = scale_pixels(array, "x")
    array[:] = 1
    assert pixels.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.array([0.0, 255.0]), r"x: expected pixels as floats in \[0, 1\], before any normalisation, got float64 from 0 to 255"),
        (np.array([-1.0, 1.0]), "from -1 to 1"),
        (np.array([0.0, np.nan]), "from nan to nan"),
        (np.array([0, 256]), r"x: expected pixels as integers in 0\.\.255 got int64 from 0 to 256"),
        (np.array([-1, 3]), "from -1 to 3"),
        (np.array(["a"]), "x: expected pixels as numbers"),
        (np.array([1j]), "x: expected pixels as numbers"),
    ],
)
def test_scaled_refuses_what_is_not_a_pixel(array: np.ndarray, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        scale_pixels(array, "x")


def test_channels_first_reads_all_three_layouts() -> None:
    images = np.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)
    assert np.array_equal(channels_first(images, "x"), images)
    assert np.array_equal(channels_first(np.moveaxis(images, 1, 3), "x"), images)
    assert np.array_equal(channels_first(images[:, 0], "x"), images[:, :1])
    for shape in ((2, 2), (2, 4, 5, 6), (2, 5, 5, 4), (1, 1, 1, 1, 1)):
        with pytest.raises(ValueError, match="expected images as N×H×W"):
            channels_first(np.zeros(shape), "x")


def test_decode_keeps_every_pixel_of_a_lossless_file() -> None:
    rng = np.random.default_rng(0)
    colour, gray = rng.integers(0, 256, (5, 7, 3), np.uint8), rng.integers(0, 256, (5, 7), np.uint8)
    assert np.array_equal(decode(encoded(colour), "x").numpy() * 255, np.moveaxis(colour, 2, 0))
    assert np.array_equal((decode(encoded(gray), "x").numpy() * 255).round(), gray[None])
    with_alpha = np.concatenate([colour, np.full((5, 7, 1), 9, np.uint8)], axis=2)
    assert np.array_equal(decode(encoded(with_alpha), "x").numpy() * 255, np.moveaxis(colour, 2, 0))
    deep = rng.integers(0, 65536, (5, 7)).astype(np.uint16)
    assert np.allclose(decode(encoded(deep), "x").numpy() * 65535, deep[None], atol=0.01)
    black_and_white = Image.fromarray(gray).convert("1")
    buffer = io.BytesIO()
    black_and_white.save(buffer, "PNG")
    assert np.array_equal(decode(buffer.getvalue(), "x").numpy()[0], np.asarray(black_and_white).astype(float))


def test_decode_turns_a_photograph_upright() -> None:
    marked = np.zeros((8, 16, 3), np.uint8)
    marked[:, :8] = 255  # the left half is bright
    rotate_clockwise = Image.Exif()
    rotate_clockwise[0x0112] = 6
    picture = decode(encoded(marked, "PNG", exif=rotate_clockwise), "x")
    assert picture.shape == (3, 16, 8)
    assert picture[:, :8].mean() == 1  # left became top
    assert picture[:, 8:].mean() == 0


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM"])
def test_a_truncated_image_is_one_sentence(kind: str) -> None:
    whole = encoded(np.random.default_rng(0).integers(0, 256, (16, 16, 3), np.uint8), kind)
    assert decode(whole, "x").shape == (3, 16, 16)
    for length in (0, 5, len(whole) // 2):
        with pytest.raises(ValueError, match=r"^cat\.img: cannot be read as an image"):
            decode(whole[:length], "cat.img")
    with pytest.raises(ValueError, match=r"^cat\.img: cannot be read as an image"):
        decode(b"these are words", "cat.img")
