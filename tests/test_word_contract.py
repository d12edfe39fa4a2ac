"""The word of every method: on hard batches no certificate or claim that the truth refutes, no crash, no more claims than samples."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.interfaces import ActiveAttack, LabelRecovery, Tampering
from dosimeter.registry import ATTACKS, FEATURES, LABELS, Registry
from tests.test_contracts import build, call, identify

METHODS = [(registry, name) for registry in (LABELS, FEATURES, ATTACKS) for name in registry]
CLAIMING = {"linear_recursion", "trap_weights", "imprint", "gradfilt_imprint"}  # attacks whose inputs are claims
FALSE_INPUT = 0.05  # relative error beyond which a claimed input is no sample of the batch
FALSE_FEATURE = 0.01


class Batches:
    """Hard batches by name: the client's samples, the protocol, and what the server is told wrongly."""

    @staticmethod
    def draw(count: int, classes: int) -> dm.Batch:
        rng = torch.Generator().manual_seed(count + classes)
        return dm.Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randperm(max(classes, count), generator=rng)[:count] % classes)

    @classmethod
    def make(cls, name: str) -> tuple[dm.Batch, int, dict, int | None]:
        """The batch, the classes, `observe`'s options, and the size that is declared instead of the true one."""
        batch, classes, options, declared = cls.draw(4, 10), 10, {}, None
        match name:
            case "black":
                batch.inputs[0] = 0
            case "duplicate":
                batch.inputs[1], batch.targets[1] = batch.inputs[0], batch.targets[0]
            case "two classes":
                batch, classes = cls.draw(4, 2), 2
            case "one too many":
                declared = 5
            case "one too few":
                declared = 3
            case "replaced":
                options = {"defenses": (dm.defense("mixup"),), "seed": 2}
        return batch, classes, options, declared


NAMES = ["black", "duplicate", "two classes", "one too many", "one too few", "replaced"]


def network(classes: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, classes)).eval()


def expose(method, name: str) -> tuple[dm.Exposure, dm.Batch]:
    batch, classes, options, declared = Batches.make(name)
    model = network(classes)
    if isinstance(method, ActiveAttack | Tampering):
        model = method.tamper(model)
    auxiliary = dm.Batch(torch.rand(30, 1, 8, 8), torch.arange(30) % classes)
    exposure = dm.observe(model, batch, auxiliary=auxiliary, **options)
    return (exposure if declared is None else replace(exposure, public=replace(exposure.public, batch_size=declared))), batch


def method_for(registry: Registry, name: str):
    method = build(registry, name, fast=True)
    options = {"input_shape": (1, 8, 8)} if hasattr(method, "input_shape") else {}
    options |= {"targets": (1,)} if isinstance(getattr(method, "targets", None), tuple) else {}
    return replace(method, **options)


@contextmanager
def sentence_or_answer() -> Iterator[list[str]]:
    """Takes a refusal, which must be a sentence, and gives it back in a list."""
    refused: list[str] = []
    try:
        yield refused
    except dm.Refused as refusal:
        refused.append(str(refusal))
    assert all(len(said.split()) >= 5 for said in refused)


def nearest(found: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """The relative distance of each row found to the nearest true one, against the mean size of the true ones: (n,)."""
    found, truth = found.flatten(1).double(), truth.flatten(1).double()
    return torch.cdist(found, truth).min(1).values / truth.norm(dim=1).mean()


def true_features(exposure: dm.Exposure, batch: dm.Batch) -> torch.Tensor:
    with torch.no_grad():
        return exposure.model[:-1](batch.inputs)


def check_labels(found: dm.LabelEstimate, batch: dm.Batch, classes: int) -> None:
    assert found.message or found.outcome is dm.Outcome.COMPLETED
    if found.certified:
        assert found.premises
        assert found.counts.tolist() == torch.bincount(batch.targets, minlength=classes).tolist()


def check_features(found: dm.FeatureEstimate, exposure: dm.Exposure, batch: dm.Batch) -> None:
    certified = found.features[found.certified]
    assert len(certified) <= (exposure.public.batch_size or len(certified))
    assert bool(found.premises) or not len(certified)
    if len(certified):
        assert float(nearest(certified, true_features(exposure, batch)).max()) < FALSE_FEATURE


def check_inputs(found: dm.Reconstruction, name: str, exposure: dm.Exposure, batch: dm.Batch) -> None:
    assert found.message or found.outcome is dm.Outcome.COMPLETED
    if name not in CLAIMING or not len(found.inputs):
        return
    assert len(found.inputs) <= (exposure.public.batch_size or len(found.inputs))
    if found.premises:
        assert float(nearest(found.inputs, batch.inputs).max()) < FALSE_INPUT


@pytest.mark.parametrize("hard", NAMES)
@pytest.mark.parametrize(("registry", "name"), METHODS, ids=identify)
def test_no_method_breaks_its_word(registry, name, hard) -> None:
    batch, classes, _, declared = Batches.make(hard)
    method = method_for(registry, name)
    with sentence_or_answer() as refused:
        exposure, batch = expose(method, hard)
        given = None if isinstance(method, LabelRecovery) else batch.targets[: declared or 4]
        found = call(registry, method, exposure, given)
    if refused:
        return
    excused = declared is not None  # a wrong size is a premise: what rests on it prints it
    if registry is LABELS:
        if not (excused and any("batch size" in premise for premise in found.premises)):
            check_labels(found, batch, classes)
    elif registry is FEATURES:
        if not (excused and any("batch size" in premise for premise in found.premises)):
            check_features(found, exposure, batch)
    else:
        check_inputs(found, name, exposure, batch)
    if hard == "replaced":
        proved = found.premises if registry is ATTACKS else found.certified
        assert not (bool(proved.any()) if isinstance(proved, torch.Tensor) else bool(proved))


@pytest.mark.parametrize("hard", NAMES)
def test_maps_keep_their_word(hard) -> None:
    batch, classes, options, declared = Batches.make(hard)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 80, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(720, classes)
        ).eval()
    exposure = dm.observe(model, batch, **options)
    if declared is not None:
        exposure = replace(exposure, public=replace(exposure.public, batch_size=declared))
    with sentence_or_answer() as refused:
        found = dm.recover_maps(exposure)
    if refused:
        return
    assert found.message or found.outcome is dm.Outcome.COMPLETED
    if hard == "replaced":
        assert not found.certified.any()
        return
    certified = found.maps[found.certified]
    if len(certified):
        with torch.no_grad():
            given = {"0": batch.inputs, "2": model[:2](batch.inputs)}[found.layer]
        assert float(nearest(certified, given).max()) < FALSE_FEATURE
