"""What a block of code leaves in the classes, globals and closures of a model is undone; what is reached is named."""

import threading
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn

from dosimeter.network.leftovers import nothing_kept
from dosimeter.network.reach import Reach

COUNTS = {"passes": 0}
UNMENTIONED = torch.zeros(9)


class Counter(nn.Module):
    limits = (0.5,) * 9

    def __init__(self):
        super().__init__()
        self.layer, self.table = nn.Linear(3, 2), torch.arange(8.0)

    def forward(self, inputs):
        COUNTS["passes"] += 1
        return self.layer(inputs)

    def train_on_everything(self):
        return UNMENTIONED


@dataclass(frozen=True)
class Held:
    items: list = field(default_factory=list)
    recent: deque = field(default_factory=lambda: deque([1], maxlen=3))
    known: set = field(default_factory=set)
    array: np.ndarray = field(default_factory=lambda: np.zeros(4))
    tensor: torch.Tensor = field(default_factory=lambda: torch.zeros(4))
    local: threading.local = field(default_factory=threading.local)


def test_globals_count_where_the_code_of_a_pass_mentions_them():
    names = [name for name, _ in Reach(Counter()).found.values()]
    assert f"{__name__}.COUNTS" in names
    assert f"{__name__}.UNMENTIONED" not in names


def test_arrays_are_named_and_weights_left_out():
    arrays = dict(Reach(Counter()).arrays().values())
    assert arrays.keys() == {"table", "Counter.limits"}
    assert arrays["table"].tolist() == list(range(8))


def test_contents_return_after_the_block_even_after_an_error():
    held, model = Held(), Counter()

    def use() -> None:
        held.items.append(1)
        held.recent.extend([2, 3, 4])
        held.known.add(5)
        held.array[:] = 1
        held.tensor.fill_(2)
        held.local.value = 3
        object.__setattr__(held, "new", 4)
        Counter.new, Counter.limits = 5, ()
        model(torch.zeros(1, 3))
        raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"), nothing_kept(held, model):
        use()
    assert (held.items, list(held.recent), held.known) == ([], [1], set())
    assert held.array.tolist() == held.tensor.tolist() == [0.0] * 4
    assert not hasattr(held.local, "value")
    assert not hasattr(held, "new")
    assert (hasattr(Counter, "new"), len(Counter.limits), COUNTS) == (False, 9, {"passes": 0})


def test_what_is_not_reached_stays_as_the_block_left_it():
    other: list[int] = []
    with nothing_kept(Counter()):
        other.append(1)
    assert other == [1]


def test_a_dictionary_that_makes_its_values_when_asked_stays_as_it_is():
    """As the table of activations of Transformers, which builds a module each time it is read."""

    class Making(OrderedDict):
        def __getitem__(self, key):
            return super().__getitem__(key)()

    class Model(nn.Linear):
        table = Making(relu=nn.ReLU)

        def forward(self, inputs):
            return self.table["relu"](super().forward(inputs))

    model = Model(2, 2)
    with nothing_kept(model):
        model(torch.ones(1, 2))
        Model.table["tanh"] = nn.Tanh
    assert list(dict.items(Model.table)) == [("relu", nn.ReLU)]


def test_an_object_whose_attributes_are_a_view_stays_as_it_is():
    """Of such an object no attribute is set, as of a method that a user registers: its class is a view of a dictionary."""

    class Viewed:
        @property
        def __dict__(self):  # type: ignore[override]
            return MappingProxyType({"table": COUNTS})

    class Model(nn.Linear):
        viewed = Viewed()

    model = Model(2, 2)
    with nothing_kept(model):
        model(torch.ones(1, 2))
    assert dict(Model.viewed.__dict__) == {"table": COUNTS}


@pytest.fixture
def shelf_on_linear():
    nn.Linear.shelf = []  # type: ignore[attr-defined]
    yield nn.Linear.shelf
    del nn.Linear.shelf


def test_what_a_script_puts_on_a_librarys_class_is_reached(shelf_on_linear):
    class Keeping(nn.Linear):
        def forward(self, inputs):
            nn.Linear.shelf.append(inputs.detach())  # type: ignore[attr-defined]
            nn.Linear.latest = inputs.detach()  # type: ignore[attr-defined]
            return super().forward(inputs)

    model = Keeping(9, 2)
    with nothing_kept(model):
        model(torch.ones(1, 9))
        assert len(shelf_on_linear) == 1
    assert shelf_on_linear == []
    assert not hasattr(nn.Linear, "latest")
    shelf_on_linear.append(torch.arange(9.0))
    assert any(torch.equal(array, torch.arange(9.0)) for _, array in Reach(model).arrays().values())
