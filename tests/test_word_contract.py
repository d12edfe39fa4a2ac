"""The word of every method of every surface: on hard batches no proof that the truth refutes, no crash, no more claims than samples."""

import functools
from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.interfaces import ActiveAttack, Tampering
from dosimeter.models.transformer import Transformer
from dosimeter.runs.server import run_method
from dosimeter.surfaces.surface import surface_named, surfaces
from tests.test_contracts import build

METHODS = [(surface.name, name) for surface in surfaces() for name in surface.methods]
HARD = ["black", "duplicate", "two classes", "one too many", "one too few", "replaced"]
EXTRA = {"one too many": 1, "one too few": -1}  # samples that are declared beside the true number
OF_SURFACE = {"maps": ["convolutions", "perceptron"], "tokens": ["texts"], "targets": ["regression"]}  # worlds; others are tried in all
OF_SURFACE |= {"membership": ["perceptron", "one sample", "normed", "texts", "regression", "noisy"]}


def draw(count: int, classes: int) -> dm.Batch:
    rng = torch.Generator().manual_seed(count + classes)
    return dm.Batch(torch.rand(count, 1, 8, 8, generator=rng), torch.randperm(max(classes, count), generator=rng)[:count] % classes)


def perceptron(classes: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, classes))


def convolutions(classes: int) -> nn.Module:
    strided = (nn.Conv2d(1, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 2, 1), nn.ReLU(), nn.Conv2d(48, 48, 3, 1, 1), nn.ReLU())
    return nn.Sequential(*strided, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, classes))


def normed(classes: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, classes))


def transformer(classes: int) -> nn.Module:
    return Transformer("gpt2", vocabulary=60, width=32, layers=2, heads=4, positions=8, classes=classes)


def wide(outputs: int) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, outputs))


WORLDS = {"perceptron": perceptron, "one sample": perceptron, "convolutions": convolutions, "normed": normed, "texts": transformer}
WORLDS |= {"several labels": wide, "regression": wide, "shuffled epochs": perceptron, "clients": perceptron}
NETWORKS = WORLDS | {"noisy": perceptron}


def targets_of(world: str, ids: torch.Tensor, classes: int) -> tuple[torch.Tensor, str | None]:
    """The targets that a world makes of class ids, and its loss."""
    if world == "several labels":
        return ((ids[:, None] + torch.arange(classes)) % 3 == 0).float(), "binary_cross_entropy"
    if world == "regression":
        return torch.sin(ids[:, None] * 2.0 + torch.arange(classes)), "squared_error"
    return ids, None


def batch_of(world: str, hard: str) -> tuple[dm.Batch, int, dict]:
    """The batch, the classes, and `observe`'s options."""
    classes = 2 if hard == "two classes" else 10
    batch, options = draw(1 if world == "one sample" else 4, classes), {}
    if world == "texts":
        batch = dm.Batch(torch.randint(60, (4, 6), generator=torch.Generator().manual_seed(7)), batch.targets)
    if hard == "black":
        batch.inputs[0] = 0  # a text of one token repeated
    elif hard == "duplicate" and len(batch.targets) > 1:
        batch.inputs[1], batch.targets[1] = batch.inputs[0], batch.targets[0]
    elif hard == "replaced":
        replacing = dm.defense("mixup") if world not in ("one sample", "texts") else dm.defense("random_labels", epsilon=0.1)
        replacing = dm.defense("pixelation", block=4) if world == "regression" else replacing
        options = {"defenses": (replacing,), "seed": 2}
    if world == "shuffled epochs":
        options["training"] = dm.FedAvg(epochs=2, mini_batch=2, shuffle=True)
    if world == "noisy" and hard != "replaced":
        options["defenses"] = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.1),)
    targets, loss = targets_of(world, batch.targets, classes)
    return dm.Batch(batch.inputs, targets), classes, options | {"loss": loss}


@functools.cache
def network(world: str, classes: int) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return NETWORKS[world](classes).eval()


def refusal_in(error: ValueError, world: str) -> str:
    """The sentence of a refusal. A method that takes pictures may refuse its options in the world of texts."""
    assert isinstance(error, dm.Refused) or world == "texts", error
    return str(error)


def method_for(surface: str, name: str):
    method = build(surface_named(surface).methods, name, fast=True)
    options = {"input_shape": (1, 8, 8)} if hasattr(method, "input_shape") else {}
    options |= {"targets": (1,)} if isinstance(getattr(method, "targets", None), tuple) else {}
    options |= {"target": 1} if isinstance(getattr(method, "target", None), int) else {}
    options |= {"clients": 4} if hasattr(method, "clients") else {}
    return replace(method, **options)


def run_hard(surface: str, method, world: str, hard: str) -> tuple[object, dm.Exposure, dm.Batch]:
    """What the method finds; a refusal is raised."""
    batch, classes, options = batch_of(world, hard)
    model = network(world, classes)
    if isinstance(method, ActiveAttack | Tampering):
        model = method.tamper(model)
    known = targets_of(world, torch.arange(30) % classes, classes)[0]
    auxiliary = None if world == "texts" else dm.Batch(draw(30, 30).inputs, known)
    clients = [dm.Batch(x[None], y[None]) for x, y in zip(batch.inputs, batch.targets)]  # one sample each
    exposure = dm.observe(model, clients if world == "clients" else batch, auxiliary=auxiliary, **options)
    declared = max(len(batch.targets) + EXTRA.get(hard, 0), 1)
    exposure = replace(exposure, public=replace(exposure.public, batch_size=declared))
    if surface_named(surface).asks_about_candidates:
        others = torch.randint(60, (30, 6), generator=torch.Generator().manual_seed(8)) if world == "texts" else draw(30, 30).inputs
        exposure = replace(exposure, candidates=dm.Batch(torch.cat((batch.inputs, others)), torch.cat((batch.targets, known))))
    labels = batch.targets[:declared] if surface_named(surface).takes_labels else None
    return run_method(exposure, method, labels, 0), exposure, batch


def claims_in(found) -> int:
    """How many samples an estimate says to have proved."""
    certified = getattr(found, "certified", getattr(found, "members", None))
    if isinstance(certified, torch.Tensor):
        return int(certified.sum())
    return len(found.inputs) if certified is None and found.premises else 0


@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize(("surface", "name"), METHODS)
def test_no_method_breaks_its_word(surface, name, hard) -> None:
    kind, method = surface_named(surface), method_for(surface, name)
    for world in OF_SURFACE.get(surface, WORLDS):
        try:
            found, exposure, batch = run_hard(surface, method, world, hard)
        except ValueError as error:
            said = refusal_in(error, world)
            assert len(said.split()) >= 5
            continue
        assert found.message or found.outcome is dm.Outcome.COMPLETED
        assert claims_in(found) <= (exposure.public.batch_size or len(batch.targets))
        assert found.premises or not kind.proves(found)
        if hard == "replaced":
            assert not kind.proves(found)
            continue
        if kind.proves(found) and not (hard in EXTRA and any("batch size" in premise for premise in found.premises)):
            false = dm.score(found, batch, exposure=exposure).details.get("false_certificates", 0)
            assert not false, (world, found)  # a wrong size is a premise: only what prints it is excused


@pytest.mark.parametrize(("surface", "name"), METHODS)
def test_every_method_runs_on_some_of_the_hard_batches(surface, name) -> None:
    """A method that is refused in all worlds would keep its word for nothing: give it a world."""
    method = method_for(surface, name)
    for world in OF_SURFACE.get(surface, WORLDS):
        for hard in HARD:
            try:
                run_hard(surface, method, world, hard)
                return
            except ValueError:
                continue
    pytest.fail(f"{name} was refused everywhere: add a world in which it runs")


@pytest.mark.parametrize("surface", [one.name for one in surfaces()])
def test_every_surface_holds_proofs_against_the_truth(surface) -> None:
    """Where a method of the surface proves anything of an easy batch, the scores say how much of it is false."""
    proved = 0
    for world in OF_SURFACE.get(surface, WORLDS):
        for name in surface_named(surface).methods:
            try:
                found, exposure, batch = run_hard(surface, method_for(surface, name), world, "easy")
            except ValueError:
                continue
            if surface_named(surface).proves(found) and world != "one sample":
                proved += 1
                assert not dm.score(found, batch, exposure=exposure).details.get("false_certificates", 0)
                other = 1 - batch.targets if batch.targets.is_floating_point() else (batch.targets + 1) % 10
                wrong = dm.Batch(batch.inputs.flip(-1) if world != "texts" else (batch.inputs + 30) % 60, other)
                assert dm.score(found, wrong, exposure=exposure).details["false_certificates"] > 0, name
    assert proved
