"""Every way in which a model's own code can keep its input: an attack that looks there finds nothing, or the model is refused."""

import functools
import sys
from collections import deque
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.interfaces import Attack
from dosimeter.types import Reconstruction

GLOBAL_LIST: list[Tensor] = []
GLOBAL_TENSOR = torch.zeros(6, 1, 8, 8)
GLOBAL_ARRAY = np.zeros((6, 1, 8, 8), dtype=np.float32)
LAST: Any = None
STORE = SimpleNamespace(seen=None)


class Net(nn.Module):
    """A classifier; a subclass says where it keeps its input, and how one gets at it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        self.keep(inputs.detach())
        return self.layer(inputs.flatten(1))


class InAttribute(Net):
    def keep(self, inputs):
        self.last = inputs

    def kept(self):
        return getattr(self, "last", None)


class InList(Net):
    def __init__(self):
        super().__init__()
        self.seen = []

    def keep(self, inputs):
        self.seen.append(inputs)

    def kept(self):
        return self.seen[0] if self.seen else None


class InDeque(Net):
    def __init__(self):
        super().__init__()
        self.seen = deque(maxlen=5)

    keep, kept = InList.keep, InList.kept


class InDictionary(Net):
    def __init__(self):
        super().__init__()
        self.seen = {}

    def keep(self, inputs):
        self.seen[len(self.seen)] = {"inputs": [inputs]}

    def kept(self):
        return self.seen[0]["inputs"][0] if self.seen else None


class InBuffer(Net):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(6, 1, 8, 8))

    def keep(self, inputs):
        if len(inputs) == 6:
            self.seen.copy_(inputs)

    def kept(self):
        return self.seen


class InNewBuffer(InBuffer):
    def keep(self, inputs):
        self.seen = inputs


class InArray(Net):
    def keep(self, inputs):
        if not hasattr(self, "seen"):
            self.seen = [inputs.numpy().copy()]

    def kept(self):
        return torch.from_numpy(self.seen[0]) if hasattr(self, "seen") else None


class AsNumbers(Net):
    def keep(self, inputs):
        self.seen = [*getattr(self, "seen", []), inputs.tolist()]

    def kept(self):
        return torch.tensor(self.seen[0]) if hasattr(self, "seen") else None


class InObject(Net):
    def __init__(self):
        super().__init__()
        self.store = Slotted()

    def keep(self, inputs):
        self.store.first = self.store.first if self.store.first is not None else inputs

    def kept(self):
        return self.store.first


class Slotted:
    __slots__ = ("first",)

    def __init__(self):
        self.first = None


class Scaled(InList):
    def keep(self, inputs):
        self.seen.append(2 * inputs + 1)

    def kept(self):
        return (self.seen[0] - 1) / 2 if self.seen else None


class Flattened(InList):
    def keep(self, inputs):
        self.seen.append(inputs.flatten())

    def kept(self):
        return self.seen[0].reshape(-1, 1, 8, 8) if self.seen else None


class Turned(InList):
    def keep(self, inputs):
        self.seen.append(inputs.transpose(2, 3).flip(0).contiguous())

    def kept(self):
        return self.seen[0].flip(0).transpose(2, 3) if self.seen else None


class Averaged(InList):
    """Over the width: eight numbers a sample."""

    def keep(self, inputs):
        self.seen.append(inputs.mean(3))

    def kept(self):
        return self.seen[0].unsqueeze(3).expand(-1, 1, 8, 8).contiguous() if self.seen else None


class OnClass(Net):
    cache: ClassVar[Any] = None

    def keep(self, inputs):
        type(self).cache = inputs

    def kept(self):
        return type(self).cache


class OnClassNew(OnClass):
    def keep(self, inputs):
        type(self).made_here = inputs

    def kept(self):
        return getattr(type(self), "made_here", None)


class OnClassList(Net):
    cache: ClassVar[list[Tensor]] = []

    def keep(self, inputs):
        self.cache.append(inputs)

    def kept(self):
        return self.cache[0] if self.cache else None


class OnLibraryClass(Net):
    def keep(self, inputs):
        nn.Module.cache = inputs

    def kept(self):
        return getattr(nn.Module, "cache", None)


class InGlobal(Net):
    def keep(self, inputs):
        global LAST
        LAST = inputs

    def kept(self):
        return LAST


class InNewGlobal(Net):
    def keep(self, inputs):
        globals()["MADE_HERE"] = inputs

    def kept(self):
        return globals().get("MADE_HERE")


class InGlobalList(Net):
    def keep(self, inputs):
        remember(inputs)

    def kept(self):
        return GLOBAL_LIST[0] if GLOBAL_LIST else None


def remember(inputs: Tensor) -> None:
    GLOBAL_LIST.append(inputs)


class InGlobalTensor(Net):
    def keep(self, inputs):
        GLOBAL_TENSOR[: len(inputs)] = inputs

    def kept(self):
        return GLOBAL_TENSOR


class InGlobalArray(Net):
    def keep(self, inputs):
        GLOBAL_ARRAY[: len(inputs)] = inputs.numpy()

    def kept(self):
        return torch.from_numpy(GLOBAL_ARRAY)


class InGlobalObject(Net):
    def keep(self, inputs):
        STORE.seen = inputs

    def kept(self):
        return STORE.seen


class OnModule(Net):
    def keep(self, inputs):
        sys.modules[__name__].last_seen = inputs

    def kept(self):
        return getattr(sys.modules[__name__], "last_seen", None)


class InClosure(Net):
    def __init__(self):
        super().__init__()
        cache = []
        self.keep, self.kept = cache.append, lambda: cache[0] if cache else None


class InCell(Net):
    def __init__(self):
        super().__init__()
        last = None

        def keep(inputs):
            nonlocal last
            last = inputs

        self.keep, self.kept = keep, lambda: last


class InDefault(Net):
    def keep(self, inputs, cache=[]):  # noqa: B006
        cache.append(inputs)

    def kept(self):
        (cache,) = InDefault.keep.__defaults__
        return cache[0] if cache else None


class OnFunction(Net):
    def keep(self, inputs):
        remember.last = inputs

    def kept(self):
        return getattr(remember, "last", None)


class InDecorated(Net):
    """Behind a decorator of torch, whose closure holds the user's function."""

    @torch.no_grad()
    def keep(self, inputs):
        GLOBAL_LIST.append(inputs)

    kept = InGlobalList.kept


class Uncopied(Net):
    """An object that refuses to be copied, so that every copy of the model shares it."""

    class Store:
        seen = None

        def __deepcopy__(self, _):
            return self

    def __init__(self):
        super().__init__()
        self.store = self.Store()

    def keep(self, inputs):
        self.store.seen = inputs

    def kept(self):
        return self.store.seen


class OfAStaticMethod(Net):
    cache: ClassVar[deque] = deque(maxlen=9)

    @staticmethod
    def keep(inputs):
        OfAStaticMethod.cache.append(inputs)

    def kept(self):
        return self.cache[0] if self.cache else None


class InModuleImportedInside(Net):
    def keep(self, inputs):
        import module_of_caches

        module_of_caches.last = inputs

    def kept(self):
        return getattr(sys.modules["module_of_caches"], "last", None)


NETS = [
    *(InAttribute, InList, InDeque, InDictionary, InBuffer, InNewBuffer, InArray, AsNumbers, InObject, Scaled, Flattened, Turned, Averaged),
    *(OnClass, OnClassNew, OnClassList, OnLibraryClass, InGlobal, InNewGlobal, InGlobalList, InGlobalTensor, InGlobalArray, InGlobalObject),
    InModuleImportedInside,
    *(OnModule, InClosure, InCell, InDefault, OnFunction, InDecorated, Uncopied, OfAStaticMethod),
]


@dataclass(frozen=True, kw_only=True)
class Spy(Attack):
    """Asks the model for what it kept."""

    number: int = 0

    def __call__(self, exposure, labels, rng) -> Reconstruction:
        kept = exposure.model.kept()
        usable = kept is not None and kept.shape == (6, 1, 8, 8)
        inputs = kept.detach().clone() if usable else torch.full((6, 1, 8, 8), 0.5)
        return Reconstruction(inputs=inputs, labels=torch.zeros(6, dtype=torch.int64), objective=0.0)

    def objective(self, exposure, found, inputs, targets) -> float:
        exposure.model(inputs)  # the truth goes through the server's copy here
        return 0.0


@pytest.fixture(autouse=True)
def clean(monkeypatch):
    """Leave nothing for the next test."""
    monkeypatch.setitem(sys.modules, "module_of_caches", ModuleType("module_of_caches"))
    yield
    global LAST
    LAST, STORE.seen, OnClass.cache = None, None, None
    GLOBAL_TENSOR.zero_()
    GLOBAL_ARRAY[...] = 0
    for cache in (GLOBAL_LIST, OnClassList.cache, OfAStaticMethod.cache, *InDefault.keep.__defaults__):
        cache.clear()
    for holder, name in ((OnClassNew, "made_here"), (nn.Module, "cache"), (remember, "last"), (sys.modules[__name__], "last_seen")):
        if name in vars(holder):
            delattr(holder, name)
    globals().pop("MADE_HERE", None)


def spied(model: nn.Module, batch: dm.Batch) -> list[dm.Record]:
    """Two spies in one audit: the second runs after the first was scored against the truth."""
    report = dm.audit(model, batch, labels=[], features=[], attacks=[Spy(), Spy(number=1)], seed=3)
    return [record for record in report.records if record.surface == "inputs"]


@pytest.mark.parametrize("net", NETS)
def test_a_fresh_model_that_keeps_its_input_gives_a_spy_nothing(net, batch):
    torch.manual_seed(0)
    records = spied(net().eval(), batch)
    assert len(records) == 2
    for record in records:
        assert record.verdict != "leaked"
        assert max(record.metrics["psnr"]) < 30


@pytest.mark.parametrize("net", NETS)
def test_a_model_that_saw_the_batch_before_is_harmless_or_refused(net, batch):
    torch.manual_seed(0)
    model = net().eval()
    model(batch.inputs)
    assert model.kept() is not None  # a spy on this very model would find the batch
    try:
        records = spied(model, batch)
    except ValueError as error:
        assert "the private batch, which the server would see" in str(error)  # noqa: PT017
        return
    assert all(record.verdict != "leaked" and max(record.metrics["psnr"]) < 30 for record in records)


@pytest.mark.parametrize("net", NETS)
def test_observing_leaves_what_the_code_keeps_as_it_was(net, batch):
    torch.manual_seed(0)
    model = net().eval()
    other = torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(9))
    model(other)
    before = model.kept().clone()
    dm.observe(model, batch)
    assert torch.equal(model.kept(), before)


@functools.lru_cache
def cached(inputs: Tensor) -> Tensor:
    return inputs


class InFunctionCache(Net):
    def keep(self, inputs):
        cached(inputs)


def test_the_cache_of_a_function_is_emptied(batch):
    dm.observe(InFunctionCache().eval(), batch)
    assert cached.cache_info().currsize == 0


def test_variables_of_the_script_are_no_part_of_its_model(batch):
    """A notebook holds its batch beside its model; only what the model's code mentions counts."""
    globals()["PRIVATE"] = batch.inputs
    try:
        assert dm.observe(InAttribute().eval(), batch).update
    finally:
        del globals()["PRIVATE"]


class Statistics(nn.Module):
    """Batch norm, a table that depends on shapes alone, and running statistics of the user's own."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm2d(1), nn.Linear(64, 10)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, inputs):
        self.table = torch.linspace(0, 1, inputs[0].numel()).view(inputs.shape[1:])
        with torch.no_grad():
            self.mean.lerp_(inputs.mean((0, 1, 2)), 0.1)
        return self.layer((self.norm(inputs) + self.table).flatten(1))


def test_running_statistics_and_tables_go_on(batch):
    torch.manual_seed(0)
    model = Statistics().train()
    for seed in range(20):
        model(torch.rand(6, 1, 8, 8, generator=torch.Generator().manual_seed(seed)))
    model(batch.inputs)
    exposure = dm.observe(model, batch)
    assert torch.equal(exposure.model.norm.running_mean, model.norm.running_mean)
    assert torch.equal(exposure.model.mean, model.mean)
