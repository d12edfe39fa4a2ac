"""What every registered method owes, whatever it does; a new method is covered by being registered."""

import copy
import inspect
import json
import re
from dataclasses import dataclass, fields, replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.config import construct, describe
from dosimeter.interfaces import (
    ActiveAttack,
    Attack,
    Bound,
    Defense,
    FeatureRecovery,
    LabelRecovery,
    Loss,
    MapRecovery,
    MembershipTest,
    Metric,
    PrivacySetting,
    TargetRecovery,
    TokenRecovery,
    Training,
)
from dosimeter.registry import (
    ATTACKS,
    BOUNDS,
    DEFENSES,
    FEATURES,
    LABELS,
    LOSSES,
    MAPS,
    MEMBERSHIP,
    METHODS,
    METRICS,
    PRIVACY,
    TARGETS,
    TOKENS,
    TRAININGS,
    Registry,
    options_of,
)
from dosimeter.runs.experiment import run
from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.types import Knowledge, Refused

# For options without a default: a value with which the method can be built.
REQUIRED = {"std": 0.1, "scale": 0.1, "max_norm": 1.0, "ratio": 0.5, "bits": 8, "clients": 3, "steps": 2, "noise_multiplier": 1.0}
REQUIRED |= {
    "rank": 2,
    "layer": "5",
    "epsilon": 1.0,
    "rate": 0.3,
    "smoothing": 0.1,
    "target": 3,
    "targets": (3,),
    "block": 2,
    "sigma": 1.0,
    "expected": 12,
}
FAST = {"steps": 4, "restarts": 1, "iterations": 4, "generations": 4, "epochs": 1, "simulations": 24}  # where an option of that name exists

ALL = [(registry, name) for registry in METHODS for name in registry]
SERVER = [(registry, name) for registry in (LABELS, FEATURES, ATTACKS) for name in registry]


def identify(value):
    return value if isinstance(value, str) else value.kind.replace(" ", "_")


def build(registry: Registry, name: str, fast: bool = False):
    usual = getattr(registry.entry(name), "strengths", ())
    required = [option.name for option in options_of(registry.entry(name)) if option.required]
    unknown = [option for option in required if option not in REQUIRED]
    if unknown and not usual:
        pytest.skip(f"{name} needs {unknown[0]}: give the class `strengths`, or REQUIRED a value")
    options = dict(usual[-1]) if usual else {option: REQUIRED[option] for option in required}
    if fast:
        options |= {option.name: FAST[option.name] for option in options_of(registry.entry(name)) if option.name in FAST}
    return registry.build(name, **options)


def call(registry: Registry, method, exposure, labels, seed=0):
    if registry is LABELS:
        return dm.recover_labels(exposure, method, seed=seed)
    if registry is FEATURES:
        return dm.recover_features(exposure, method, labels=labels, seed=seed)
    return dm.reconstruct(exposure, method, labels=labels, seed=seed)


def exposures(digits, classifier):
    """Settings that grant a lot: a method must work in one of them."""
    images, labels = digits
    torch.manual_seed(3)
    auxiliary = dm.Batch(images[500:800], labels[500:800])
    distinct = torch.tensor([0, 1, 2, 3])
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 12, bias=False), nn.ReLU(), nn.Linear(12, 10, bias=False))
    normed = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 10)).eval()
    strided = (nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 32, 3, 1, 1), nn.ReLU())
    deep = nn.Sequential(*strided, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)).eval()
    for model, chosen in ((classifier, distinct), (normed, distinct), (classifier, distinct[:1]), (bare, distinct[:1]), (deep, distinct)):
        batch = dm.Batch(images[chosen].clone(), labels[chosen].clone())
        yield batch, dm.observe(model, batch, auxiliary=auxiliary)
    two = distinct[:2]
    several = dm.Batch(images[two].clone(), nn.functional.one_hot(labels[two], 10).float())
    yield several, dm.observe(classifier, several, auxiliary=auxiliary, loss="binary_cross_entropy")
    batch = dm.Batch(images[distinct].clone(), labels[distinct].clone())
    yield batch, dm.observe(classifier, batch, auxiliary=auxiliary, training=dm.FedAvg(epochs=2, mini_batch=2, shuffle=True))


def measurement_of(registry: Registry, method) -> Measurement:
    if registry is LABELS:
        return Measurement(labels=method)
    return Measurement(labels="optimised", method=method)


@pytest.mark.parametrize(("registry", "name"), SERVER, ids=identify)
def test_only_a_theorem_makes_a_method_impossible(classifier, dead_classifier, batch, registry, name):
    """A model that gives every batch zero is impossible by its theorem. Otherwise a method runs or is not attempted."""
    client, measurement = AuditedClient(model=classifier, batch=batch), measurement_of(registry, build(registry, name, fast=True))
    exposure = dm.observe(classifier, batch)
    zero = replace(exposure, update={layer: torch.zeros_like(change) for layer, change in exposure.update.items()})
    record = run(client, measurement, exposure=zero)
    assert (record.outcome, record.verdict) == ("not attempted", "not attempted")
    record = run(AuditedClient(model=dead_classifier, batch=batch), measurement, exposure=dm.observe(dead_classifier, batch))
    assert (record.outcome, record.verdict) == ("impossible", "impossible here")
    assert record.details["theorem"] in record.reason
    scant = replace(exposure, update={"0.weight": exposure.update["0.weight"]}, public=replace(exposure.public, batch_size=None))
    record = run(client, measurement, exposure=scant)
    assert record.verdict != "impossible here"
    assert "theorem" not in record.details
    assert record.metrics or (record.outcome, record.verdict) == ("not attempted", "not attempted")


def tensors(value):
    found = [getattr(value, field.name) for field in fields(value)]
    return [thing for thing in found if isinstance(thing, torch.Tensor)]


@pytest.mark.parametrize(("registry", "name"), ALL, ids=identify)
def test_configuration_round_trips(registry, name):
    @dataclass(frozen=True, kw_only=True)
    class Holder:
        method: registry.interface  # pyright: ignore

    Holder.__annotations__["method"] = registry.interface
    method = build(registry, name)
    holder = Holder(method=method)
    assert construct(Holder, json.loads(json.dumps(describe(holder), allow_nan=False))) == holder


@pytest.mark.parametrize(("registry", "name"), ALL, ids=identify)
def test_docstring_has_idea_and_source(registry, name):
    lines = (inspect.getdoc(registry.entry(name)) or "").splitlines()
    assert lines, "no docstring"
    assert lines[0].endswith("."), "line one is the idea, one whole sentence"
    assert len(lines[0]) <= 140
    body = "\n".join(lines[1:]).strip()
    assert body if registry is METRICS else re.search(r"\d{4}|Eq|[Tt]hesis|[Oo]urs", body), "the docstring must name its source"


@pytest.mark.parametrize(
    ("registry", "name"), [(r, n) for r, n in ALL if r in (LABELS, FEATURES, ATTACKS, DEFENSES, METRICS)], ids=identify
)
def test_file_name_is_registry_name(registry, name):
    assert registry.entry(name).__module__.rsplit(".", 1)[-1] == name


@pytest.mark.parametrize(("registry", "name"), ALL, ids=identify)
def test_unknown_options_are_refused_by_name(registry, name):
    with pytest.raises(ValueError, match="unknown option 'no_such_option'"):
        registry.build(name, no_such_option=1)


@pytest.mark.parametrize(("registry", "name"), SERVER, ids=identify)
def test_the_server_side_is_sealed_repeatable_and_pure(registry, name, digits, classifier):
    """Same seed same result bit for bit, also after the batch was scrambled in place; nothing it was given is changed."""
    method = build(registry, name, fast=True)
    if isinstance(method, ActiveAttack) or Knowledge.TAMPERED_MODEL in method.needs:
        pytest.skip("works on a tampered model only; its own tests cover this")
    for batch, exposure in exposures(digits, classifier):
        given = batch.targets.clone()
        before = copy.deepcopy((exposure.update, exposure.model.state_dict(), exposure.auxiliary))
        try:
            first = call(registry, method, exposure, given)
        except Refused:
            continue
        batch.inputs.uniform_()
        batch.targets.zero_()
        again = call(registry, method, exposure, given)
        for one, other in zip(tensors(first), tensors(again)):
            assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert all(torch.equal(before[0][key], value) for key, value in exposure.update.items())
        assert all(torch.equal(before[1][key], value) for key, value in exposure.model.state_dict().items())
        assert torch.equal(before[2].inputs, exposure.auxiliary.inputs)
        return
    pytest.fail("refused in every setting")


@pytest.mark.parametrize(("registry", "name"), SERVER, ids=identify)
def test_needs_are_enforced(registry, name, digits, classifier):
    method = build(registry, name, fast=True)
    images, labels = digits
    batch = dm.Batch(images[:3], labels[:3])
    withheld = dm.observe(classifier, batch, declare_batch_size=False)
    without_head = {key: value for key, value in withheld.update.items() if not key.startswith("5.")}
    poor = type(withheld)(model=withheld.model, update=without_head, public=withheld.public, auxiliary=None)
    if not method.needs - {Knowledge.SOFTMAX_LOSS, Knowledge.TAMPERED_MODEL}:
        pytest.skip("needs nothing that this exposure lacks")
    with pytest.raises(Refused, match=f"{name}.*needs"):
        call(registry, method, poor, None)


@dataclass(frozen=True, kw_only=True)
class FirstDraw(Attack):
    """Returns its starting point, so that a test can see whether it moved."""

    def __call__(self, exposure, labels, rng):
        start = torch.randn(2, *exposure.public.input_shape, generator=rng)
        return dm.Reconstruction(inputs=start, labels=torch.zeros(2, dtype=torch.int64), objective=0.0)


@pytest.mark.parametrize("name", list(DEFENSES))
def test_switching_a_defense_on_does_not_move_the_attack(name, classifier, batch):
    try:
        defended = dm.observe(classifier, batch, defenses=(build(DEFENSES, name),), seed=7)
    except Refused as refusal:
        pytest.skip(str(refusal))
    plain = dm.observe(classifier, batch, seed=7)
    first, other = (dm.reconstruct(exposure, FirstDraw(), seed=7).inputs for exposure in (plain, defended))
    assert torch.equal(first, other)
    assert not torch.equal(first, dm.reconstruct(plain, FirstDraw(), seed=8).inputs)


def test_every_interface_has_its_registry():
    wanted = {LABELS: LabelRecovery, FEATURES: FeatureRecovery, MAPS: MapRecovery, TARGETS: TargetRecovery, TOKENS: TokenRecovery}
    wanted |= {ATTACKS: Attack, DEFENSES: Defense, BOUNDS: Bound, LOSSES: Loss, TRAININGS: Training, METRICS: Metric}
    wanted |= {PRIVACY: PrivacySetting, MEMBERSHIP: MembershipTest}
    assert {registry: registry.interface for registry in METHODS} == wanted
    assert {"idlg", "ilrg"} <= set(LABELS)
    assert {"dlg", "inverting_gradients"} <= set(ATTACKS)
    assert {"gaussian_noise", "clipping", "pruning"} <= set(DEFENSES)
