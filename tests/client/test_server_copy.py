"""The server's copy: nothing that the model's own code or a hook keeps of the private batch is in an exposure."""

import threading
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.interfaces import Attack
from dosimeter.types import Reconstruction


class Keeper(nn.Module):
    """A classifier that keeps what it sees, in every way that a forward pass can."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.seen: list[Tensor] = []
        self.last: Tensor | None = None
        self.register_buffer("buffer", torch.zeros(6, 1, 8, 8))

    def forward(self, inputs: Tensor) -> Tensor:
        self.last, self.by_name = inputs.detach(), {"inputs": inputs.detach()}
        self.seen.append(inputs.detach())
        self.buffer = inputs.detach()
        return self.layer(inputs.flatten(1))


@pytest.fixture
def keeper() -> Keeper:
    torch.manual_seed(0)
    return Keeper().eval()


def reachable_tensors(thing: object) -> list[Tensor]:
    """Every tensor that can be reached from a value: through attributes, containers and what functions close over."""
    found, met, waiting = [], set(), [thing]
    while waiting:
        value = waiting.pop()
        if id(value) in met or isinstance(value, (type, str, int, float)) or type(value).__name__ == "module":
            continue
        met.add(id(value))
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, dict):
            waiting.extend(value.values())
        elif isinstance(value, (list, tuple, set, frozenset)):
            waiting.extend(value)
        elif getattr(value, "__closure__", None):
            waiting.extend(cell.cell_contents for cell in value.__closure__)
        waiting.extend(vars(value).values() if hasattr(value, "__dict__") and not isinstance(value, Tensor) else ())
        waiting.append(getattr(value, "__self__", None))
    return found


def holds(exposure: dm.Exposure, batch: dm.Batch) -> bool:
    """Whether any tensor of an exposure holds a private sample."""
    rows = [t.detach().reshape(-1, 64) for t in reachable_tensors(exposure) if t.numel() and t.numel() % 64 == 0]
    return any(bool(torch.isclose(row, sample).all(1).any()) for row in rows for sample in batch.inputs.flatten(1))


@dataclass(frozen=True, kw_only=True)
class Thief(Attack):
    """Takes what the model kept."""

    def __call__(self, exposure, labels, rng) -> Reconstruction:
        kept = [t for t in reachable_tensors(exposure) if t.shape[1:] == exposure.public.input_shape and len(t) == 6]
        inputs = kept[0] if kept else torch.full((6, *exposure.public.input_shape), 0.5)
        return Reconstruction(inputs=inputs, labels=torch.zeros(6, dtype=torch.int64), objective=0.0)


def test_a_model_that_keeps_its_input_hands_nothing_over(keeper, batch):
    exposure = dm.observe(keeper, batch, defenses=(dm.defense("soteria", ratio=0.5), "mixup"))
    assert not holds(exposure, batch)
    assert keeper.last is None
    assert keeper.seen == []


def test_a_hook_with_a_cache_hands_nothing_over(classifier, batch):
    cache: list[Tensor] = []
    classifier.register_forward_hook(lambda module, arguments, output: cache.append(arguments[0]))
    classifier[0].register_forward_pre_hook(lambda module, arguments: cache.extend(arguments))
    before = dm.observe(classifier, batch)
    assert not holds(before, batch)
    assert cache == []
    classifier(batch.inputs)
    assert holds(dm.Exposure(model=classifier, update=before.update, public=before.public), batch)  # the walk would have found it


def test_an_audit_of_a_model_that_keeps_its_input_gives_a_thief_nothing(keeper, batch):
    report = dm.audit(keeper, batch, labels=[], features=["subspace"], attacks=[Thief()])
    (record,) = [record for record in report.records if record.surface == "inputs"]
    assert max(record.metrics["psnr"]) < 30
    assert not any(torch.equal(seen[:1], batch.inputs[:1]) for seen in keeper.seen)


def test_what_the_model_saw_before_the_audit_is_overwritten_or_refused(keeper, batch):
    keeper(batch.inputs)
    keeper.seen.clear()
    with pytest.raises(ValueError, match="model: 'buffer' holds samples of the private batch"):
        dm.observe(keeper, batch)
    keeper.buffer = torch.zeros(6, 1, 8, 8)
    assert not torch.equal(dm.observe(keeper, batch).model.last, batch.inputs)
    assert torch.equal(keeper.last, batch.inputs)  # the user's own model is left alone
    keeper.seen.append(batch.inputs[2:3])
    with pytest.raises(ValueError, match="model: 'seen' holds samples of the private batch"):
        dm.observe(keeper, batch)


def test_a_hook_that_the_model_needs_stays_and_is_warned_of(classifier, batch):
    classifier[2].register_forward_hook(lambda module, arguments, output: output * 2)
    with pytest.warns(UserWarning, match="the hook on '2' changes what the model computes"):
        exposure = dm.observe(classifier, batch)
    assert torch.equal(exposure.model(batch.inputs), classifier(batch.inputs))


def test_scoring_features_leaves_the_exposure_without_the_truth(keeper, batch):
    exposure = dm.observe(keeper, batch)
    dm.score(dm.recover_features(exposure, "subspace"), batch, exposure=exposure)
    assert not holds(exposure, batch)


def test_a_model_that_cannot_be_copied_is_refused_with_a_sentence(keeper, batch):
    keeper.lock = threading.Lock()
    with pytest.raises(ValueError, match=r"model: cannot be copied: cannot pickle '_thread\.lock' object"):
        dm.observe(keeper, batch)
