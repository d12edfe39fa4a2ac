from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dosimeter.data.dataset import ImageSet, by_class, resize, select, stratified_mask, with_channels
from dosimeter.data.parts import own_parts, standard_part
from dosimeter.randomness import generator


def numbered_set(labels: list[int] | torch.Tensor, classes: int = 10) -> ImageSet:
    """Image i is filled with i / N, so that an image says where it came from."""
    labels = torch.as_tensor(labels)
    values = torch.arange(len(labels)) / len(labels)
    return ImageSet(
        name="numbered",
        images=values.reshape(-1, 1, 1, 1).expand(-1, 1, 2, 2),
        labels=labels,
        class_names=tuple(map(str, range(classes))),
        origin="test",
    )


def places(images: ImageSet, total: int) -> list[int]:
    return (images.images[:, 0, 0, 0] * total).round().long().tolist()


def test_select_keeps_order_and_pairs() -> None:
    images = numbered_set([0, 1, 2, 3, 4])
    chosen = select(images, [3, 0, 3])
    assert places(chosen, 5) == [3, 0, 3]
    assert chosen.labels.tolist() == [3, 0, 3]
    masked = select(images, images.labels > 2)
    assert places(masked, 5) == [3, 4]


@settings(deadline=None, max_examples=100)
@given(labels=st.lists(st.integers(0, 4), min_size=1, max_size=60), data=st.data())
def test_stratified_takes_its_share_of_every_class(labels: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, len(labels)))
    seed = data.draw(st.integers(0, 1000))
    ids = torch.tensor(labels)
    mask = stratified_mask(ids, size, generator(seed, "test"))
    assert int(mask.sum()) == size
    taken = torch.bincount(ids[mask], minlength=5).double()
    share = torch.bincount(ids, minlength=5).double() * size / len(labels)
    assert bool(((taken - share).abs() < 1).all())


def test_stratified_gives_every_sample_the_same_chance() -> None:
    labels = torch.tensor([0] * 7 + [1] * 2 + [2])
    rng = generator(3, "test")
    hits = torch.stack([stratified_mask(labels, 4, rng) for _ in range(1000)]).double().mean(0)
    assert torch.allclose(hits, torch.full((10,), 0.4, dtype=torch.float64), atol=0.08)  # 5 standard errors


def test_by_class_sorts_classes_and_shuffles_within() -> None:
    labels = torch.tensor([2, 0, 1, 0, 2, 0, 2])
    orders = [by_class(labels, generator(seed, "test")) for seed in range(20)]
    assert all(labels[order].tolist() == [0, 0, 0, 1, 2, 2, 2] for order in orders)
    assert all(sorted(order.tolist()) == list(range(7)) for order in orders)
    assert len({tuple(order.tolist()) for order in orders}) > 10


def test_a_stratified_part_is_repeatable_and_moves_with_the_seed() -> None:
    labels = torch.tensor([0] * 40 + [1] * 20 + [2] * 20)
    first, again, other = (stratified_mask(labels, 20, generator(seed, "split")) for seed in (0, 0, 1))
    assert torch.bincount(labels[first]).tolist() == [10, 5, 5]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_resize_takes_the_central_square_and_averages() -> None:
    picture = torch.zeros(1, 1, 4, 8)
    picture[..., 2:6] = torch.tensor([0.0, 0.5, 0.5, 1.0])  # only these columns are in the central square
    images = ImageSet(name="wide", images=picture, labels=torch.zeros(1, dtype=torch.int64), class_names=("a",), origin="test")
    assert torch.equal(resize(images, 4).images, picture[..., 2:6])
    constant = torch.full((1, 3, 9, 7), 0.3)
    flat = ImageSet(name="flat", images=constant, labels=torch.zeros(1, dtype=torch.int64), class_names=("a",), origin="test")
    assert torch.allclose(resize(flat, 5).images, torch.full((1, 3, 5, 5), 0.3))
    # halving with antialiasing is Pillow's bilinear reduction
    from PIL import Image

    noise = torch.rand(1, 1, 16, 16, generator=generator(0, "noise"))
    ours = resize(ImageSet(name="n", images=noise, labels=torch.zeros(1, dtype=torch.int64), class_names=("a",), origin="test"), 8)
    theirs = np.asarray(Image.fromarray(noise[0, 0].numpy(), mode="F").resize((8, 8), Image.Resampling.BILINEAR))
    assert np.allclose(ours.images[0, 0].numpy(), theirs, atol=1e-5)
    with pytest.raises(ValueError, match="positive size, got 0"):
        resize(flat, 0)


def test_channels_follow_pillow_and_come_back() -> None:
    from PIL import Image

    values = torch.randint(0, 256, (5, 3, 6, 6), generator=generator(0, "colours"))
    images = ImageSet(name="c", images=values / 255, labels=torch.zeros(5, dtype=torch.int64), class_names=("a",), origin="test")
    gray = with_channels(images, 1)
    reference = np.stack([np.asarray(Image.fromarray(v.permute(1, 2, 0).byte().numpy()).convert("L")) for v in values])
    assert np.abs(gray.images[:, 0].numpy() * 255 - reference).max() <= 1.0  # Pillow rounds to 8 bits
    colour = with_channels(gray, 3)
    assert colour.images.shape == (5, 3, 6, 6)
    assert torch.allclose(with_channels(colour, 1).images, gray.images, atol=1e-6)
    assert with_channels(images, 3).images is images.images
    with pytest.raises(ValueError, match="expected 1 or 3, got 2"):
        with_channels(images, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"images": torch.zeros(2, 1, 2)}, r"expected images \(N, channels, H, W\)"),
        ({"images": torch.zeros(2, 1, 2, 2, dtype=torch.float64)}, "float32"),
        ({"images": torch.zeros(0, 1, 2, 2), "labels": torch.zeros(0, dtype=torch.int64)}, "at least one image"),
        ({"images": torch.full((2, 1, 2, 2), 2.0)}, r"pixels in \[0, 1\], got 2 to 2"),
        ({"images": torch.full((2, 1, 2, 2), float("nan"))}, r"pixels in \[0, 1\], got nan"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, "expected 2 int64 labels"),
        ({"labels": torch.zeros(2)}, "expected 2 int64 labels"),
        ({"labels": torch.tensor([0, 3])}, r"must lie in 0\.\.1, got 0\.\.3"),
        ({"labels": torch.tensor([-1, 0])}, r"must lie in 0\.\.1, got -1\.\.0"),
    ],
)
def test_a_set_that_makes_no_sense_is_refused(change: dict, message: str) -> None:
    fields = {"images": torch.zeros(2, 1, 2, 2), "labels": torch.zeros(2, dtype=torch.int64), **change}
    with pytest.raises(ValueError, match=message) as error:
        ImageSet(name="broken", class_names=("a", "b"), origin="the test", **fields)
    assert "broken (the test)" in str(error.value)


def test_images_are_contiguous_whatever_came_in() -> None:
    strided = torch.rand(3, 5, 5, 3).permute(0, 3, 1, 2)
    images = ImageSet(name="s", images=strided, labels=torch.zeros(3, dtype=torch.int64), class_names=("a",), origin="test")
    assert images.images.is_contiguous()
    assert torch.equal(images.images, strided)


def test_standard_parts_are_fixed_disjoint_and_complete() -> None:
    images = numbered_set([0] * 25 + [1] * 25)
    train, test = standard_part(images, "train"), standard_part(images, "test")
    assert sorted(places(train, 50) + places(test, 50)) == list(range(50))
    assert torch.bincount(test.labels).tolist() == [5, 5]
    assert places(standard_part(images, "test"), 50) == places(test, 50)
    assert standard_part(images, "all") is images
    with pytest.raises(ValueError, match="too few for a test part"):
        standard_part(numbered_set([0, 1]), "test")
    with pytest.raises(ValueError, match="got 'tset'"):
        standard_part(images, "tset")  # pyright: ignore[reportArgumentType]


def test_own_parts() -> None:
    assert own_parts({"test", "train"}, "all", "x") == ["train", "test"]
    assert own_parts({"test", "val", "train"}, "test", "x") == ["test"]
    assert own_parts({"val", "train"}, "test", "x") == ["val"]
    with pytest.raises(ValueError, match="x: has no test part, only train"):
        own_parts({"train"}, "test", "x")
    with pytest.raises(ValueError, match="x: has no train part, only test"):
        own_parts({"test"}, "train", "x")
