from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dosimeter.options import OptionError
from dosimeter.randomness import generator
from dosimeter.registry import SAMPLERS
from dosimeter.types import Refused

CLASSES = 6
LABELS = st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=40)


def drawn(name: str, labels: list[int], batch_size: int, seed: int, **options: Any) -> list[int]:
    """The class counts of a batch, after the laws that hold for every sampler."""
    ids = torch.tensor(labels)
    before = ids.clone()
    sampler = SAMPLERS.build(name, **options)
    indices = sampler(ids, batch_size, CLASSES, generator(seed, "sampler"))
    assert indices.shape == (batch_size,)
    assert len(set(indices.tolist())) == batch_size, "a sample was drawn twice"
    assert int(indices.min()) >= 0
    assert int(indices.max()) < len(labels)
    assert torch.equal(indices, sampler(ids, batch_size, CLASSES, generator(seed, "sampler"))), "same seed, other batch"
    assert torch.equal(ids, before)
    return torch.bincount(ids[indices], minlength=CLASSES).tolist()


def available(labels: list[int]) -> list[int]:
    return [labels.count(c) for c in range(CLASSES)]


def possible_counts(labels: list[int], batch_size: int, fits: Any) -> bool:
    """Brute force: is there any batch of the data whose class counts `fits` accepts?"""
    ranges = [range(min(n, batch_size) + 1) for n in available(labels)]
    return any(sum(counts) == batch_size and fits(counts) for counts in itertools.product(*ranges))


@settings(deadline=None, max_examples=60)
@given(labels=LABELS, batch_size=st.integers(1, 45), seed=st.integers(0, 10**6))
def test_random(labels: list[int], batch_size: int, seed: int) -> None:
    if batch_size > len(labels):
        with pytest.raises(Refused, match=f"a batch of {batch_size} .* the data have {len(labels)}"):
            drawn("random", labels, batch_size, seed)
    else:
        assert sum(drawn("random", labels, batch_size, seed)) == batch_size


def test_random_gives_every_sample_the_same_chance() -> None:
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    rng, sampler = generator(5, "sampler"), SAMPLERS.build("random")
    hits = sum(torch.bincount(sampler(labels, 4, 3, rng), minlength=10) for _ in range(1000)) / 1000
    assert torch.allclose(torch.as_tensor(hits), torch.full((10,), 0.4), atol=0.08)  # 5 standard errors


@settings(deadline=None, max_examples=100)
@given(labels=LABELS, batch_size=st.integers(1, CLASSES + 1), seed=st.integers(0, 10**6))
def test_unique(labels: list[int], batch_size: int, seed: int) -> None:
    if batch_size > len(set(labels)):
        with pytest.raises(Refused):
            drawn("unique", labels, batch_size, seed)
    else:
        assert max(drawn("unique", labels, batch_size, seed)) == 1


@settings(deadline=None, max_examples=100)
@given(labels=st.lists(st.integers(0, CLASSES - 1), min_size=1, max_size=14), batch_size=st.integers(1, 14), seed=st.integers(0, 10**6))
def test_uniform(labels: list[int], batch_size: int, seed: int) -> None:
    def balanced(counts: tuple[int, ...]) -> bool:
        present = [count for count, n in zip(counts, available(labels)) if n]
        return max(present) - min(present) <= 1

    if possible_counts(labels, batch_size, balanced):
        assert balanced(tuple(drawn("uniform", labels, batch_size, seed)))
    else:
        with pytest.raises(Refused):
            drawn("uniform", labels, batch_size, seed)


@settings(deadline=None, max_examples=100)
@given(labels=LABELS, batch_size=st.integers(1, 20), class_id=st.none() | st.integers(0, CLASSES), seed=st.integers(0, 10**6))
def test_single_class(labels: list[int], batch_size: int, class_id: int | None, seed: int) -> None:
    sizes = [*available(labels), 0]
    if (max(sizes) if class_id is None else sizes[class_id]) < batch_size:
        with pytest.raises(Refused):
            drawn("single_class", labels, batch_size, seed, class_id=class_id)
    else:
        counts = drawn("single_class", labels, batch_size, seed, class_id=class_id)
        assert max(counts) == batch_size
        assert class_id is None or counts[class_id] == batch_size


@settings(deadline=None, max_examples=150)
@given(labels=LABELS, batch_size=st.integers(1, 20), count=st.integers(1, CLASSES + 1), seed=st.integers(0, 10**6))
def test_sub_classes(labels: list[int], batch_size: int, count: int, seed: int) -> None:
    sizes = sorted(available(labels), reverse=True)
    if count > len(set(labels)) or count > batch_size or sum(sizes[:count]) < batch_size:
        with pytest.raises(Refused):
            drawn("sub_classes", labels, batch_size, seed, count=count)
    else:
        assert sum(n > 0 for n in drawn("sub_classes", labels, batch_size, seed, count=count)) == count


@settings(deadline=None, max_examples=150)
@given(
    labels=LABELS,
    batch_size=st.integers(1, 20),
    ratio=st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.9, 1.0]),
    class_id=st.none() | st.integers(0, CLASSES - 1),
    seed=st.integers(0, 10**6),
)
def test_imbalanced(labels: list[int], batch_size: int, ratio: float, class_id: int | None, seed: int) -> None:
    dominant = int(ratio * batch_size + 0.5)
    sizes = available(labels)
    candidates = range(CLASSES) if class_id is None else [class_id]
    if any(
        sizes[c] >= dominant and len(labels) - sizes[c] >= batch_size - dominant for c in candidates if sizes[c] or class_id is not None
    ):
        counts = drawn("imbalanced", labels, batch_size, seed, ratio=ratio, class_id=class_id)
        assert dominant in counts
        assert class_id is None or counts[class_id] == dominant
    else:
        with pytest.raises(Refused):
            drawn("imbalanced", labels, batch_size, seed, ratio=ratio, class_id=class_id)


def test_imbalanced_as_in_table_5_of_ilrg() -> None:
    labels = torch.arange(100).repeat_interleave(50)
    for batch_size in (24, 32, 50):
        sampler = SAMPLERS.build("imbalanced", ratio=(batch_size - 2) / batch_size, class_id=18, others=(0, 92))
        counts = torch.bincount(labels[sampler(labels, batch_size, 100, generator(0, "sampler"))], minlength=100)
        assert (counts[0], counts[18], counts[92], counts.sum()) == (1, batch_size - 2, 1, batch_size)


@settings(deadline=None, max_examples=150)
@given(
    labels=LABELS,
    batch_size=st.integers(1, 12),
    sharing=st.integers(0, 12),
    class_id=st.none() | st.integers(0, CLASSES - 1),
    seed=st.integers(0, 10**6),
)
def test_duplicates(labels: list[int], batch_size: int, sharing: int, class_id: int | None, seed: int) -> None:
    sizes = available(labels)
    candidates = [c for c in range(CLASSES) if sizes[c] >= max(sharing, 1)] if class_id is None or sharing == 0 else [class_id]
    fits = any(sizes[c] >= sharing and sum(n > 0 for k, n in enumerate(sizes) if k != c) >= batch_size - sharing for c in candidates)
    if sharing == 0:
        fits = len(set(labels)) >= batch_size
    if sharing <= batch_size and fits:
        counts = drawn("duplicates", labels, batch_size, seed, count=sharing, class_id=class_id)
        assert sorted(n for n in counts if n) == sorted(([sharing] if sharing else []) + [1] * (batch_size - sharing))
        assert class_id is None or sharing == 0 or counts[class_id] == sharing
    else:
        with pytest.raises(Refused):
            drawn("duplicates", labels, batch_size, seed, count=sharing, class_id=class_id)


@pytest.mark.parametrize("eighths", [0, 2, 4, 6, 8])
def test_duplicates_as_in_table_8_of_rgla(eighths: int) -> None:
    labels = torch.arange(20).repeat_interleave(10)
    indices = SAMPLERS.build("duplicates", proportion=eighths / 8)(labels, 8, 20, generator(1, "sampler"))
    counts = torch.bincount(labels[indices], minlength=20)
    assert sorted(counts[counts > 0].tolist()) == [1] * (8 - eighths) + ([eighths] if eighths else [])


def test_drawn_classes_and_samples_vary_with_the_seed() -> None:
    labels = torch.arange(CLASSES).repeat_interleave(20)
    for name in SAMPLERS:
        batches = {tuple(SAMPLERS.build(name)(labels, 6, CLASSES, generator(seed, "s")).tolist()) for seed in range(10)}
        assert len(batches) == 10, name
    chosen = {int(labels[SAMPLERS.build("single_class")(labels, 6, CLASSES, generator(seed, "s"))[0]]) for seed in range(60)}
    assert chosen == set(range(CLASSES))


def test_absent_classes_are_left_out() -> None:
    labels = torch.tensor([1, 3] * 10)
    counts = torch.bincount(labels[SAMPLERS.build("uniform")(labels, 8, 1000, generator(0, "s"))], minlength=1000)
    assert counts.nonzero().squeeze(1).tolist() == [1, 3]
    assert counts[[1, 3]].tolist() == [4, 4]


@pytest.mark.parametrize(
    ("name", "options", "batch_size", "message"),
    [
        ("random", {}, 99, "a batch of 99 needs as many samples, the data have 12"),
        ("unique", {}, 4, "4 samples of different classes were asked for, the data have 3 such classes"),
        ("uniform", {}, 10, "10 samples spread evenly over 3 classes need 3 or 4 of each, class 2 has 1"),
        ("single_class", {"class_id": 2}, 3, "3 samples of class 2 were asked for, the data have 1"),
        ("single_class", {}, 9, "9 samples of one class were asked for, the largest class that can give them has 7"),
        ("sub_classes", {"count": 4}, 5, "from 4 classes was asked for, the data have 3 classes"),
        ("sub_classes", {"count": 2}, 12, "the 2 largest with 11 samples"),
        ("imbalanced", {"ratio": 0.9}, 10, "9 samples of one class were asked for"),
        ("imbalanced", {"ratio": 0.2, "class_id": 0}, 10, "8 samples beside the dominant class were asked for, the data have 5"),
        ("imbalanced", {"class_id": 0, "others": (0, 1)}, 4, "must differ from one another and from class 0"),
        ("imbalanced", {"others": (9,)}, 4, r"other classes up to 9 were asked for, the classes are 0\.\.2"),
        (
            "imbalanced",
            {"ratio": 0.2, "class_id": 0, "others": (2,)},
            5,
            "4 samples spread evenly over 1 classes need 4 of each, class 2 has 1",
        ),
        ("duplicates", {"count": 5}, 4, "5 samples that share a label were asked for in a batch of 4"),
        ("duplicates", {"count": 2}, 6, "4 samples of different classes were asked for, the data have 2 such classes"),
    ],
)
def test_refusals_give_the_numbers(name: str, options: dict, batch_size: int, message: str) -> None:
    labels = torch.tensor([0] * 7 + [1] * 4 + [2])
    with pytest.raises(Refused, match=message) as error:
        SAMPLERS.build(name, **options)(labels, batch_size, 3, generator(0, "s"))
    assert str(error.value).startswith(f"sampler {name}: ")


def test_wrong_arguments() -> None:
    sampler = SAMPLERS.build("random")
    with pytest.raises(ValueError, match=r"must lie in 0\.\.2, got 0\.\.5"):
        sampler(torch.tensor([0, 5]), 1, 3, generator(0, "s"))
    with pytest.raises(ValueError, match="batch size of at least 1, got 0"):
        sampler(torch.tensor([0, 1]), 0, 3, generator(0, "s"))
    with pytest.raises(ValueError, match=r"expected .* class ids"):
        sampler(torch.tensor([0.0, 1.0]), 1, 3, generator(0, "s"))
    with pytest.raises(OptionError, match=r"sampler.ratio: expected a number in \[0, 1\]"):
        SAMPLERS.build("imbalanced", ratio=1.5)
    with pytest.raises(OptionError, match=r"sampler\.count: expected a positive int"):
        SAMPLERS.build("sub_classes", count=0)
