from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dosimeter.data.dataset import ImageSet, select
from dosimeter.data.partition import duplicates, partition
from dosimeter.randomness import generator


def distinct_set(count: int, classes: int = 4) -> ImageSet:
    """Image i spells i in base 256, so that no two are equal after rounding to 8 bits."""
    numbers = torch.arange(count)
    pixels = torch.stack([numbers // 256, numbers % 256], dim=1).float() / 255
    labels = torch.arange(count) % classes
    return ImageSet(name="distinct", images=pixels.reshape(-1, 1, 1, 2), labels=labels, class_names=("a",) * classes, origin="test")


def numbers(images: ImageSet) -> list[int]:
    pixels = (images.images * 255).round().long().reshape(-1, 2)
    return (pixels[:, 0] * 256 + pixels[:, 1]).tolist()


@settings(deadline=None, max_examples=60)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=4), spare=st.integers(0, 10), seed=st.integers(0, 10**6))
def test_parts_are_disjoint_sized_stratified_and_repeatable(sizes: list[int], spare: int, seed: int) -> None:
    images = distinct_set(sum(sizes) + spare)
    wanted = {f"part {k}": size for k, size in enumerate(sizes)}
    parts = partition(images, wanted, generator(seed, "partition"))
    assert list(parts) == list(wanted)
    assert [len(part) for part in parts.values()] == sizes
    everything = [number for part in parts.values() for number in numbers(part)]
    assert len(set(everything)) == len(everything)
    for part in parts.values():
        assert part.labels.tolist() == [number % 4 for number in numbers(part)]
    again = partition(images, wanted, generator(seed, "partition"))
    assert all(numbers(parts[name]) == numbers(again[name]) for name in wanted)


def test_parts_have_every_class_alike() -> None:
    parts = partition(distinct_set(400), {"private": 40, "auxiliary": 0.5, "foreign": 0.25}, generator(0, "partition"))
    counts = {name: torch.bincount(part.labels).tolist() for name, part in parts.items()}
    assert counts == {"private": [10] * 4, "auxiliary": [50] * 4, "foreign": [25] * 4}


def test_a_later_part_does_not_move_an_earlier_one() -> None:
    images = distinct_set(100)
    alone = partition(images, {"private": 8}, generator(7, "partition"))
    both = partition(images, {"private": 8, "auxiliary": 50}, generator(7, "partition"))
    assert numbers(alone["private"]) == numbers(both["private"])


def test_fractions_fill_the_set_and_round_down() -> None:
    parts = partition(distinct_set(101), {"a": 0.5, "b": 0.5}, generator(0, "partition"))
    assert [len(part) for part in parts.values()] == [50, 50]
    assert len(partition(distinct_set(100), {"a": 0.29}, generator(0, "partition"))["a"]) == 29
    assert len(partition(distinct_set(100), {"a": 1.0}, generator(0, "partition"))["a"]) == 100


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"private": 60, "auxiliary": 0.5}, "private 60 [+] auxiliary 50 = 110 images, but distinct has 100"),
        ({"private": 0}, "partition.private: expected at least one image, got 0 of 100"),
        ({"private": -3}, "partition.private: expected at least one image, got -3 of 100"),
        ({"private": 0.001}, "partition.private: expected at least one image"),
        ({"private": 1.5}, r"partition.private: expected a fraction in \(0, 1\], got 1.5"),
        ({"private": float("nan")}, "partition.private: expected a fraction"),
    ],
)
def test_impossible_sizes_are_refused(sizes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        partition(distinct_set(100), sizes, generator(0, "partition"))


def test_duplicates_finds_planted_doubles_and_no_others() -> None:
    images = distinct_set(300)
    parts = partition(images, {"private": 20, "auxiliary": 100}, generator(0, "partition"))
    assert duplicates(parts["private"], parts["auxiliary"]).tolist() == [-1] * 20
    leaking = select(images, numbers(parts["auxiliary"]) + numbers(parts["private"])[3:5] * 2)
    assert duplicates(parts["private"], leaking).tolist() == [-1] * 3 + [100, 101] + [-1] * 15  # the first double, not the second


def test_duplicates_sees_through_float_rounding_but_not_through_one_level() -> None:
    images = distinct_set(4)
    blurred = ImageSet(name="b", images=(images.images * 0.999 + 0.0005), labels=images.labels, class_names=("a",) * 4, origin="t")
    assert duplicates(images, blurred).tolist() == [0, 1, 2, 3]
    brighter = ImageSet(name="b", images=images.images * 0.5 + 0.5, labels=images.labels, class_names=("a",) * 4, origin="t")
    assert duplicates(images, brighter).tolist() == [-1] * 4
    with pytest.raises(ValueError, match="must have one image shape"):
        duplicates(images, ImageSet(name="b", images=torch.zeros(1, 3, 1, 2), labels=torch.zeros(1).long(), class_names=("a",), origin="t"))
