"""Which samples of a data set make a batch, by the distribution of their labels."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from dosimeter.data.dataset import by_class
from dosimeter.interfaces import Sampler
from dosimeter.options import Fraction, NonNegativeInt, PositiveInt
from dosimeter.registry import SAMPLERS
from dosimeter.types import Refused


@dataclass(frozen=True, kw_only=True)
class CountingSampler(Sampler):
    """A sampler that sets the number of samples of each class. Which samples of a class are drawn is random, without repeats."""

    @abstractmethod
    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        """(C,) samples that the data hold of each class -> (C,) samples to draw, `batch_size` in all."""

    def __call__(self, labels: Tensor, batch_size: int, classes: int, rng: Generator) -> Tensor:
        """The indices (B,) of a batch, in random order."""
        if labels.ndim != 1 or labels.is_floating_point() or len(labels) == 0:
            raise ValueError(f"sampler {self.name}: expected (N,) class ids, got {tuple(labels.shape)} {labels.dtype}")
        if labels.min() < 0 or labels.max() >= classes:
            span = f"{int(labels.min())}..{int(labels.max())}"
            raise ValueError(f"sampler {self.name}: class ids must lie in 0..{classes - 1}, got {span}")
        if batch_size < 1:
            raise ValueError(f"sampler {self.name}: expected a batch size of at least 1, got {batch_size}")
        if batch_size > len(labels):
            raise Refused(f"sampler {self.name}: a batch of {batch_size} needs as many samples, the data have {len(labels)}")
        available = torch.bincount(labels, minlength=classes)  # (C,)
        counts = self.label_counts(available.to(rng.device), batch_size, rng).to(labels.device)  # (C,)
        order = by_class(labels, rng)  # (N,)
        sorted_labels, first = labels[order], available.cumsum(0) - available
        rank = torch.arange(len(labels), device=labels.device) - first[sorted_labels]  # (N,) place within its class
        chosen = order[rank < counts[sorted_labels]]  # (B,)
        return chosen[torch.randperm(len(chosen), generator=rng, device=rng.device).to(labels.device)]


@SAMPLERS.register("random")
@dataclass(frozen=True, kw_only=True)
class Random(CountingSampler):
    """Any samples, all equally likely."""

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        return _at_random(available, batch_size, rng)


@SAMPLERS.register("unique")
@dataclass(frozen=True, kw_only=True)
class Unique(CountingSampler):
    """No two samples of one class."""

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        return _one_each(available, available > 0, batch_size, rng, self.name)


@SAMPLERS.register("uniform")
@dataclass(frozen=True, kw_only=True)
class Uniform(CountingSampler):
    """Every class that is present equally often, to within one sample."""

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        return _evenly(available, available > 0, batch_size, rng, self.name)


@SAMPLERS.register("single_class")
@dataclass(frozen=True, kw_only=True)
class SingleClass(CountingSampler):
    """All samples of one class: `class_id`, or one drawn among the classes that are large enough."""

    class_id: NonNegativeInt | None = None

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        chosen = _one_class(available, batch_size, self.class_id, available > 0, rng, self.name)
        return batch_size * _mask(available, chosen)


@SAMPLERS.register("sub_classes")
@dataclass(frozen=True, kw_only=True)
class SubClasses(CountingSampler):
    """Random samples of `count` drawn classes, at least one of each.

    The thesis's subclassed batches (section 4.5.4), which are random within the subset; one of each class is asked for here
    so that `count` means what it says. Where the drawn classes are too small together, larger ones take their place.
    """

    count: PositiveInt = 2

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        largest = int(available.sort(descending=True).values[: self.count].sum())
        present = int((available > 0).sum())
        if not self.count <= min(batch_size, present) or largest < batch_size:
            raise _refusal(
                self.name,
                f"a batch of {batch_size} from {self.count} classes was asked for, the data have {present} classes, "
                f"the {min(self.count, present)} largest with {largest} samples",
            )
        chosen = _mask(available, _choose(available > 0, self.count, rng))
        while int(available[chosen].sum()) < batch_size:
            chosen[int(torch.where(chosen, available, available.max() + 1).argmin())] = False
            chosen[int(torch.where(chosen, -1, available).argmax())] = True
        return chosen + _at_random((available - 1) * chosen, batch_size - self.count, rng)


@SAMPLERS.register("imbalanced")
@dataclass(frozen=True, kw_only=True)
class Imbalanced(CountingSampler):
    """One dominant class makes up `ratio` of the batch; the rest is spread evenly over `others`, or drawn at random from all.

    Ma et al., ICLR 2023, Table 5: ratio (B-2)/B, class_id 18, others (0, 92). The thesis, Fig. 3.4: ratio 0.1 to 0.9.
    """

    ratio: Fraction = 0.5
    class_id: NonNegativeInt | None = None  # drawn among the classes that are large enough
    others: tuple[NonNegativeInt, ...] = ()

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        others = torch.tensor(self.others, dtype=torch.int64, device=available.device)
        if len(set(self.others)) < len(self.others) or self.class_id in self.others:
            raise _refusal(self.name, f"the other classes must differ from one another and from class {self.class_id}, got {self.others}")
        if len(others) and int(others.max()) >= len(available):
            raise _refusal(self.name, f"other classes up to {int(others.max())} were asked for, the classes are 0..{len(available) - 1}")
        dominant = _round_half_up(self.ratio * batch_size)
        rest = batch_size - dominant
        may_dominate = ~_mask(available, others) if len(others) else int(available.sum()) - available >= rest
        chosen = _mask(available, _one_class(available, dominant, self.class_id, may_dominate, rng, self.name))
        if len(others):
            return dominant * chosen + _evenly(available, _mask(available, others), rest, rng, self.name)
        remaining = available * ~chosen
        if int(remaining.sum()) < rest:
            raise _refusal(self.name, f"{rest} samples beside the dominant class were asked for, the data have {int(remaining.sum())}")
        return dominant * chosen + _at_random(remaining, rest, rng)


@SAMPLERS.register("duplicates")
@dataclass(frozen=True, kw_only=True)
class Duplicates(CountingSampler):
    """A given part of the batch shares one label, the others all differ from it and from one another.

    RGLA, Table 8: proportions 0/8 to 8/8 of a batch of 8. `count`, where given, stands in place of `proportion`; one sample
    that shares its label with nobody is as good as none.
    """

    proportion: Fraction = 0.5
    count: NonNegativeInt | None = None
    class_id: NonNegativeInt | None = None  # the label that is shared; drawn among the classes that are large enough

    def label_counts(self, available: Tensor, batch_size: int, rng: Generator) -> Tensor:
        sharing = _round_half_up(self.proportion * batch_size) if self.count is None else self.count
        if sharing > batch_size:
            raise _refusal(self.name, f"{sharing} samples that share a label were asked for in a batch of {batch_size}")
        if sharing == 0:
            return _one_each(available, available > 0, batch_size, rng, self.name)
        shared = _mask(available, _one_class(available, sharing, self.class_id, available > 0, rng, self.name))
        return sharing * shared + _one_each(available, (available > 0) & ~shared, batch_size - sharing, rng, self.name)


def _at_random(available: Tensor, count: int, rng: Generator) -> Tensor:
    """The class counts (C,) of `count` samples drawn without replacement."""
    pool = torch.arange(len(available), device=available.device).repeat_interleave(available)
    drawn = pool[torch.randperm(len(pool), generator=rng, device=rng.device)[:count]]
    return torch.bincount(drawn, minlength=len(available))


def _one_each(available: Tensor, allowed: Tensor, count: int, rng: Generator, name: str) -> Tensor:
    if count > int(allowed.sum()):
        raise _refusal(name, f"{count} samples of different classes were asked for, the data have {int(allowed.sum())} such classes")
    return _mask(available, _choose(allowed, count, rng)).long()


def _evenly(available: Tensor, chosen: Tensor, count: int, rng: Generator, name: str) -> Tensor:
    """`count` samples spread evenly over the classes of the mask. Random classes that have enough samples give one more."""
    share, extra = divmod(count, int(chosen.sum()))
    spare = chosen & (available > share)
    if bool((available[chosen] < share).any()) or int(spare.sum()) < extra:
        scarce = int(torch.where(chosen, available, available.max() + 1).argmin())
        needed = f"{share} or {share + 1}" if extra else f"{share}"
        spread = f"{count} samples spread evenly over {int(chosen.sum())} classes need {needed} of each"
        raise _refusal(name, f"{spread}, class {scarce} has {int(available[scarce])}")
    return share * chosen + _mask(available, _choose(spare, extra, rng))


def _one_class(available: Tensor, count: int, class_id: int | None, allowed: Tensor, rng: Generator, name: str) -> Tensor:
    """The class asked for, or one drawn among the allowed ones with at least `count` samples: (1,)."""
    if class_id is not None:
        have = int(available[class_id]) if class_id < len(available) else 0
        if have < count:
            raise _refusal(name, f"{count} samples of class {class_id} were asked for, the data have {have}")
        return torch.tensor([class_id], device=available.device)
    fitting = allowed & (available >= max(count, 1))
    if not fitting.any():
        largest = int((available * allowed).max())
        raise _refusal(name, f"{count} samples of one class were asked for, the largest class that can give them has {largest}")
    return _choose(fitting, 1, rng)


def _choose(mask: Tensor, count: int, rng: Generator) -> Tensor:
    """`count` random classes of the mask, all equally likely: (count,)."""
    classes = mask.nonzero().squeeze(1)
    return classes[torch.randperm(len(classes), generator=rng, device=rng.device)[:count]]


def _mask(like: Tensor, classes: Tensor) -> Tensor:
    mask = torch.zeros(len(like), dtype=torch.bool, device=like.device)
    mask[classes] = True
    return mask


def _round_half_up(number: float) -> int:
    return math.floor(number + 0.5)  # Python's round would take halves to the even side


def _refusal(name: str, reason: str) -> Refused:
    return Refused(f"sampler {name}: {reason}")
