"""A new defense is one class: registered here and nowhere else known, it is treated rightly by everything that meets it.

Each test also breaks the statement that it is about and shows that the outcome changes.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import pytest
import torch
from torch import Generator, Tensor, nn

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.defenses.outgoing import OutgoingDefense
from dosimeter.engines.adaptation import adapt, distrust
from dosimeter.engines.privacy import gaussian_epsilon, guarantees
from dosimeter.engines.scalar.verdict import doubt_of
from dosimeter.interfaces import Attack, Client, Defense, Public, Replay
from dosimeter.options import PositiveFloat
from dosimeter.registry import DEFENSES
from dosimeter.runs.defense_grid import DefenseGrid
from dosimeter.runs.experiment import run
from dosimeter.runs.measurement import AuditedClient, Measurement
from dosimeter.runs.utility import update_bytes
from dosimeter.types import Distortion, Encoding, ProtectedUnit, Update

WHOLE, DIRECTION = dm.attack("dlg", steps=3, restarts=1), dm.attack("inverting_gradients", steps=3)


@dataclass(frozen=True, kw_only=True)
class Normalised(OutgoingDefense):
    """Sends the update with a norm of `size`, whatever norm it had."""

    strengths: ClassVar = ({"size": 1.0}, {"size": 0.1})

    size: PositiveFloat

    def protect(self, update: Update, rng: Generator) -> Update:
        return self.normalised(update)

    def normalised(self, update: Update) -> Update:
        factor = self.size / sum(change.square().sum() for change in update.values()) ** 0.5
        return {name: change * factor for name, change in update.items()}

    def distorts(self) -> bool:
        return False

    def scaling(self) -> Literal["update"]:
        return "update"

    def replay(self, sent: Update, attack: Attack, later: Sequence[Defense]) -> Replay:
        return Replay(note="the guess is normalised too", transform=self.normalised)

    def norm_bound(self) -> float:
        return self.size


@dataclass(frozen=True, kw_only=True)
class Averaged(Defense):
    """Trains on the mean of every sample and the next one, under the sample's own label."""

    side: ClassVar = "data"
    replaces: ClassVar[bool] = True
    voids: ClassVar[frozenset[ProtectedUnit]] = frozenset({"sample"})

    def __call__(self, client: Client, rng: Generator) -> Client:
        inputs = client.batch.inputs
        return replace(client, batch=dm.Batch((inputs + inputs.roll(1, 0)) / 2, client.batch.targets))

    def distorts(self) -> bool:
        return False


@dataclass(frozen=True, kw_only=True)
class Rounded(OutgoingDefense):
    """Rounds every entry to a multiple of `step`."""

    strengths: ClassVar = ({"step": 1e-4}, {"step": 1e-2})

    step: PositiveFloat

    def protect(self, update: Update, rng: Generator) -> Update:
        return {name: (change / self.step).round() * self.step for name, change in update.items()}

    def distorts(self) -> bool:
        return True

    def distortion(self, change: Tensor, public: Public) -> Distortion:
        nowhere = torch.zeros_like(change, dtype=torch.bool)
        return Distortion(noise=0.0, live=nowhere, low=change - self.step / 2, high=change + self.step / 2)

    def scaling(self) -> Literal["none"]:
        return "none"

    def encoding(self, before: Encoding) -> Encoding:
        return replace(before, bits=16, rank=None)


@dataclass(frozen=True, kw_only=True)
class RoundedUnmodelled(Rounded):
    """The same, by someone who cannot say what it does to an entry."""

    distortion = Defense.distortion


NEW = {
    "normalised": Normalised,
    "averaged": Averaged,
    "rounded": Rounded,
    "rounded_unmodelled": RoundedUnmodelled,
}


@pytest.fixture(autouse=True)
def new(monkeypatch):
    """The new defenses under their names; the registry forgets them afterwards."""
    monkeypatch.setattr(DEFENSES, "_entries", {name: DEFENSES.entry(name) for name in DEFENSES})
    for name, entry in NEW.items():
        DEFENSES.register(name)(entry)


def denying(defense: Defense, **statements) -> Defense:
    """A defense that does the same and says otherwise."""
    said = {name: value if name in ("replaces", "voids") else lambda *_, value=value: value for name, value in statements.items()}
    entry = type(type(defense).__name__, (type(defense),), {**said, "name": defense.name})
    return entry(**vars(defense))


def client(samples: int = 6) -> AuditedClient:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 20))
        return AuditedClient(model=model, batch=dm.Batch(torch.rand(samples, 30), torch.arange(samples)))


def seen(*defenses: Defense, samples: int = 6, declared: bool = True) -> dm.Exposure:
    subject = client(samples)
    return dm.observe(subject.model, subject.batch, defenses=defenses, declare_batch_size=declared)


def feature_errors(found: dm.FeatureEstimate) -> Tensor:
    """Relative distance of each recovered feature to the private sample's of the same label: (n,)."""
    subject = client()
    truth = subject.model[:2](subject.batch.inputs).detach()[found.labels]
    return (found.features - truth).norm(dim=1) / truth.norm(dim=1)


def twice() -> Normalised:
    """Normalised to twice the norm that the update has."""
    norm = sum(float(change.square().sum()) for change in seen().update.values()) ** 0.5
    return Normalised(size=2 * norm)


def test_a_defense_that_does_not_say_whether_it_distorts_cannot_be_registered():
    class Silent(OutgoingDefense):
        def protect(self, update, rng):
            return update

    with pytest.raises(ValueError, match="cannot be registered: it does not say `distorts`"):
        DEFENSES.register("silent")(Silent)
    assert "silent" not in DEFENSES


@dataclass(frozen=True, kw_only=True)
class Repeated(Defense):
    """Trains on every sample twice."""

    side: ClassVar = "data"
    replaces: ClassVar[bool] = False

    def distorts(self) -> bool:
        return False

    def __call__(self, client: Client, rng: Generator) -> Client:
        return replace(client, batch=dm.Batch(client.batch.inputs.repeat(2, 1), client.batch.targets.repeat(2)))


@pytest.mark.parametrize(
    ("statements", "problem"),
    [
        ({"side": "updates"}, "`side`: expected one of data, model, training, update, got 'updates'"),
        ({"side": "data"}, "does not say `replaces`"),
        ({"distorts": True}, "`distorts`: expected a method, got True"),
    ],
)
def test_a_defense_that_says_too_little_or_wrongly_cannot_be_registered(statements, problem):
    wrong = type("Wrong", (Rounded,), statements)
    with pytest.raises(ValueError, match=problem):
        DEFENSES.register("wrong")(wrong)
    assert "wrong" not in DEFENSES


def test_only_a_defense_is_registered_as_one():
    with pytest.raises(ValueError, match="expected a Defense"):
        DEFENSES.register("nothing")(dict)


def test_changed_data_void_the_guarantee_of_a_sample_unless_the_defense_denies_it():
    noisy = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0)
    assert guarantees([Repeated(), noisy]) == []
    denied = type("Denied", (Repeated,), {"voids": frozenset()})
    assert guarantees([denied(), noisy]) == guarantees([noisy])


def test_a_distortion_that_is_none_for_a_layer_is_no_model(monkeypatch):
    exposure = seen(Rounded(step=1e-9), declared=False)
    assert dm.recover_features(exposure, "subspace").certified.any()
    monkeypatch.setattr(Rounded, "distortion", lambda self, change, public: None)
    assert not dm.recover_features(exposure, "subspace").certified.any()


def test_what_is_certified_behind_an_unknown_scale_is_true():
    exposure = seen(twice(), declared=False)
    found, labels = dm.recover_features(exposure, "subspace"), dm.recover_labels(exposure, "subspace")
    assert bool(found.certified.all())
    assert len(found.labels) == 6
    assert float(feature_errors(found).max()) < 1e-4
    assert labels.certified
    assert labels.labels.tolist() == [0, 1, 2, 3, 4, 5]


def test_who_denies_the_scale_loses_the_certificates():
    """Twice its share of the gradient is no sample's, so that nothing true can be proved either."""
    exposure = seen(denying(twice(), scaling="none"), declared=False)
    assert not bool(dm.recover_features(exposure, "subspace").certified.any())
    assert not dm.recover_labels(exposure, "subspace").certified


def test_the_scalar_doubts_a_scaled_and_a_rounded_gradient_but_not_an_averaged_sample():
    for defense in (Normalised(size=1.0), Rounded(step=1e-6), RoundedUnmodelled(step=1e-6)):
        exposure = seen(defense, samples=1)
        assert defense.name in doubt_of(exposure.public)
        assert not dm.recover_labels(exposure, "soft_scalar").certified
        denied = denying(defense, scaling="none", distorts=False)
        assert doubt_of(seen(denied, samples=1).public) == ""
    assert doubt_of(seen(Averaged(), samples=2).public) == ""


def test_nothing_of_the_private_samples_is_certified_where_the_batch_is_replaced():
    for defense, proved in ((Averaged(), 0), (denying(Averaged(), replaces=False), 6)):
        for method in ({"method": dm.feature_recovery("subspace")}, {"labels": dm.label_recovery("subspace")}):
            record = run(client(), Measurement(**{"labels": "optimised", **method}, defenses=(defense,)))
            assert int(record.details["certified"]) == (proved if "method" in method else bool(proved))
            assert ("not of the private ones" in record.details["message"]) == (proved == 0)
    false = run(
        client(), Measurement(labels="optimised", method=dm.feature_recovery("subspace"), defenses=(denying(Averaged(), replaces=False),))
    )
    assert false.details["false_certificates"] == 6


def test_behind_rounding_the_most_likely_features_lie_within_the_bounds():
    found = dm.recover_features(seen(Rounded(step=1e-3)), "subspace")
    assert not bool(found.certified.any())
    assert "most likely features behind the defenses" in found.message
    assert float(feature_errors(found).max()) < 0.02
    denied = dm.recover_features(seen(denying(Rounded(step=1e-3), distorts=False)), "subspace")
    assert "most likely" not in denied.message


def test_a_distortion_without_a_model_leaves_no_certificate_and_is_said():
    for step in (1e-8, 1e-6):
        exposure = seen(RoundedUnmodelled(step=step))
        found, labels = dm.recover_features(exposure, "subspace"), dm.recover_labels(exposure, "subspace")
        assert not bool(found.certified.any())
        assert not labels.certified
        for message in (found.message, labels.message):
            assert "rounded_unmodelled changes the gradient's entries in a way that is not modelled" in message
        denied = seen(denying(RoundedUnmodelled(step=step), distorts=False))
        assert bool(dm.recover_features(denied, "subspace").certified.all())


def test_attacks_replay_what_the_defense_says():
    exposure = seen(Normalised(size=0.1))
    adapted = adapt(WHOLE, exposure)
    assert adapted.changed
    assert adapted.notes == ("normalised: the guess is normalised too",)
    subject, public = client(), adapted.exposure.public
    replayed = public.training(subject.model, subject.batch.inputs, subject.batch.targets, public.loss)
    assert all(torch.allclose(replayed[name], change, atol=1e-7) for name, change in exposure.update.items())
    for defense in (Averaged(), Rounded(step=0.01)):
        (note,) = adapt(DIRECTION, seen(defense)).notes
        assert note == f"{defense.name}: no counter is known here"


def test_recoveries_say_what_they_do_and_the_server_trusts_accordingly():
    features, ilrg, subspace = dm.feature_recovery("subspace"), dm.label_recovery("ilrg"), dm.label_recovery("subspace")
    said = {entry: features.counter(entry) for entry in (Normalised(size=1.0), Rounded(step=0.1), RoundedUnmodelled(step=0.1), Averaged())}
    phrases = ("free of the gradient's scale", "most likely features", "no counter of its own", "no counter of its own")
    assert all(phrase in note for phrase, note in zip(phrases, said.values()))
    for defense in said:
        trusts_subspace = distrust(subspace, (defense,)) < distrust(ilrg, (defense,))
        assert trusts_subspace == (not defense.distorts())


def test_the_accountant_takes_the_bound_and_the_voids_from_the_defense():
    noise, private = dm.defense("gaussian_noise", std=3.0), dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.1)
    (found,) = guarantees([Normalised(size=2.0), noise], steps=10)
    assert (found.unit, found.source) == ("client", "normalised and gaussian_noise by rdp")
    assert found.epsilon == gaussian_epsilon(noise_multiplier=0.75, steps=10)
    assert guarantees([denying(Normalised(size=2.0), norm_bound=float("inf")), noise]) == []
    assert guarantees([Rounded(step=0.1), noise]) == []
    assert guarantees([Averaged(), private]) == []
    assert len(guarantees([denying(Averaged(), voids=frozenset()), private])) == 1


def test_the_bytes_follow_the_encoding():
    update = {"w": torch.ones(6, 10)}
    assert update_bytes(update, [Rounded(step=0.1)]) == 60 * 2 + 4
    assert update_bytes(update, [Rounded(step=0.1), dm.defense("gaussian_noise", std=0.1)]) == 240
    assert update_bytes(update, [Normalised(size=1.0), Averaged()]) == 240


def test_the_grid_tries_each_at_its_strengths(tmp_path, capsys):
    words = ['labels=["subspace"]', 'features=["subspace"]', 'attacks=[{name="dlg", steps=2}]', "batches=1"]
    words += ["data.batch_size=4", "federation.clients=2", "federation.rounds=2", "federation.batch_size=8"]
    assert main(["audit", *words, "--defenses", "normalised,averaged,rounded", "--out", str(tmp_path), "--json"]) == 0
    records = json.loads(capsys.readouterr().out)["records"]
    costs = [record for record in records if record["surface"] == "utility"]
    cells = [[(one["name"], one.get("size", one.get("step"))) for one in cost["threat_model"]["defenses"]] for cost in costs]
    assert cells == [[], [("normalised", 1.0)], [("normalised", 0.1)], [("averaged", None)], [("rounded", 1e-4)], [("rounded", 1e-2)]]
    assert [cost["outcome"] for cost in costs] == ["completed"] * 6
    assert [cost["metrics"]["bytes_ratio"][0] < 0.6 for cost in costs] == [False, False, False, False, True, True]
    adaptive = {record["threat_model"]["defenses"][0]["name"] for record in records if record["config"].get("adaptive")}
    assert adaptive == {"normalised"}
    replaced = [record for record in records if record["threat_model"]["defenses"][:1] == costs[3]["threat_model"]["defenses"]]
    assert not any(record["details"].get("certified") for record in replaced)


def test_all_has_those_with_strengths():
    names = {cell[0].name for cell in DefenseGrid().cells[1:]}
    assert {"normalised", "rounded"} <= names
    assert "averaged" not in names
