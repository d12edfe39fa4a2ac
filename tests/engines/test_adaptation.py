import math
import statistics

import pytest

import dosimeter as dm
from dosimeter.engines.adaptation import Countered, adapt, distrust
from dosimeter.models.loading import ModelConfig
from dosimeter.registry import ATTACKS, DEFENSES
from dosimeter.runs.audit import Suite, run_suite
from dosimeter.runs.audited_client import DataConfig, prepare
from dosimeter.runs.experiment import run
from dosimeter.runs.measurement import Measurement

WHOLE = dm.attack("dlg", steps=3, restarts=1)
DIRECTION = dm.attack("inverting_gradients", steps=3)


@pytest.fixture(scope="module")
def subject():
    return prepare(ModelConfig(options={"activation": "relu"}), DataConfig(name="digits", batch_size=4), seed=77)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("clipping", {"max_norm": 0.1}),
        ("clipping", {"max_norm": 0.05, "mode": "layer"}),
        ("clipping", {"max_norm": 0.001, "mode": "value"}),
        ("pruning", {"ratio": 0.9}),
        ("pruning", {"ratio": 0.99, "scope": "update"}),
        ("soteria", {"ratio": 0.5}),
        ("low_rank", {"rank": 2}),
    ],
)
def test_what_is_replayed_at_the_truth_is_what_was_sent(classifier, batch, name, options):
    """Without the counter the replayed gradient of the true batch differs from the update; with it, it is the update."""
    exposure = dm.observe(classifier, batch, defenses=(dm.defense(name, **options),))
    adapted = adapt(WHOLE, exposure)
    assert adapted.changed
    before, after = (
        _misfit(seen, seen.public.training(seen.model, batch.inputs, batch.targets, seen.public.loss))
        for seen in (exposure, adapted.exposure)
    )
    assert before > 0.05
    assert after < 1e-5


def test_counters_compose_in_the_order_of_the_defenses(classifier, batch):
    defenses = (dm.defense("clipping", max_norm=0.1), dm.defense("low_rank", rank=2), dm.defense("pruning", ratio=0.8))
    seen = adapt(WHOLE, dm.observe(classifier, batch, defenses=defenses)).exposure
    replayed = seen.public.training(seen.model, batch.inputs, batch.targets, seen.public.loss)
    biases = {name for name in replayed if name.endswith("bias")}
    assert _misfit(seen, {name: replayed[name] for name in biases}) < 1e-5  # low_rank does not touch them
    assert isinstance(seen.public.training, Countered)
    assert len(seen.public.training.after) == 3


def test_each_layer_is_weighed_by_its_known_noise(classifier, batch):
    """After weighing, every layer's rounding error has the same size, and the update keeps its norm."""
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("quantisation", bits=6),))
    adapted = adapt(DIRECTION, exposure)
    steps = {name: float(change.abs().max()) / 31 for name, change in exposure.update.items()}
    weights = {name: float(adapted.exposure.update[name].norm() / change.norm()) for name, change in exposure.update.items()}
    products = [steps[name] * weights[name] for name in steps]
    assert max(products) == pytest.approx(min(products), rel=1e-4)
    assert _norm(adapted.exposure.update) == pytest.approx(_norm(exposure.update), rel=1e-4)


@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise"])
def test_one_variance_for_all_changes_nothing_and_says_so(classifier, batch, name):
    size = {"gaussian_noise": "std", "laplace_noise": "scale"}[name]
    exposure = dm.observe(classifier, batch, defenses=(dm.defense(name, **{size: 0.01}),))
    adapted = adapt(DIRECTION, exposure)
    assert not adapted.changed
    assert adapted.exposure is exposure
    assert "weighs them alike" in adapted.notes[0]
    relative = dm.observe(classifier, batch, defenses=(dm.defense(name, **{size: 0.01, "relative": True}),))
    assert adapt(DIRECTION, relative).changed


def test_directions_do_not_see_a_common_scale(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("clipping", max_norm=0.1),))
    adapted = adapt(DIRECTION, exposure)
    assert not adapted.changed
    assert "does not see a common scale" in adapted.notes[0]


def test_mixup_lets_labels_move_where_the_attack_can(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("mixup"),))
    assert adapt(WHOLE, exposure).method.joint_labels is True
    assert not adapt(DIRECTION, exposure).changed
    assert "no counter is known here" in adapt(DIRECTION, exposure).notes[0]


def test_every_defense_gets_its_sentence(classifier, batch):
    required = {"laplace_noise": {"scale": 0.1}, "secure_aggregation": {"clients": 2}, "only_layer": {"layer": "5"}}
    required |= {"label_smoothing": {"smoothing": 0.1}, "pixelation": {"block": 2}, "blur": {"sigma": 1.0}}
    required |= {"dp_pixelation": {"block": 2, "epsilon": 1.0}, "head_row_noise": {"std": 0.1}}
    for name in DEFENSES:
        usual = DEFENSES.entry(name).strengths
        defense = dm.defense(name, **(usual[0] if usual else required.get(name, {})))
        exposure = dm.observe(classifier.train(name in ("dropout", "precode")), batch, defenses=(defense,))
        for attack in (WHOLE, DIRECTION, dm.label_recovery("ilrg"), dm.label_recovery("subspace"), dm.feature_recovery("subspace")):
            (note,) = adapt(attack, exposure).notes
            assert note.startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("method", "defense", "said"),
    [
        (dm.feature_recovery("subspace"), dm.defense("pruning", ratio=0.9), "it guesses, as the most likely features"),
        (dm.feature_recovery("subspace"), dm.defense("clipping", max_norm=1.0), "is free of the gradient's scale"),
        (dm.attack("rgla", features="subspace"), dm.defense("clipping", max_norm=1.0), "subspace is free of the gradient's scale"),
        (dm.attack("rgla", features="rgla"), dm.defense("clipping", max_norm=1.0), "rgla has no counter of its own here"),
        (dm.feature_recovery("subspace"), dm.defense("mixup"), "takes samples of two labels apart"),
        (dm.label_recovery("gradient_bridge"), dm.defense("head_withheld"), "does without the head"),
        (dm.feature_recovery("quotient"), dm.defense("pruning", ratio=0.9), "has no counter of its own here"),
    ],
)
def test_recoveries_say_what_they_do_of_themselves(classifier, batch, method, defense, said):
    adapted = adapt(method, dm.observe(classifier, batch, defenses=(defense,)))
    assert said in adapted.notes[0]
    assert not adapted.changed


TRUSTED = ["subspace", "ilrg", "posterior", "llg", "zlg", "idlg"]


@pytest.mark.parametrize(
    ("defenses", "order"),
    [
        ((), TRUSTED),
        ((dm.defense("pruning", ratio=0.0),), TRUSTED),
        ((dm.defense("clipping", max_norm=1.0),), TRUSTED),
        ((dm.defense("gaussian_noise", std=0.1),), [*TRUSTED[1:], "subspace"]),
        ((dm.defense("sign"),), [*TRUSTED[1:], "subspace"]),
        ((dm.defense("pruning", ratio=0.9),), ["llg", "idlg", "subspace", "ilrg", "posterior", "zlg"]),
    ],
)
def test_the_server_trusts_what_the_defenses_leave(defenses, order):
    recoveries = [dm.label_recovery(name) for name in ["rlg", *sorted(TRUSTED), "llg_plus"]]
    ranked = [recovery.name for recovery in sorted(recoveries, key=lambda recovery: distrust(recovery, defenses))]
    assert ranked == [*order, "rlg", "llg_plus"]


def test_an_audit_shows_both_and_the_record_says_which(subject):
    suite = Suite(
        defenses=(dm.defense("pruning", ratio=0.9),),
        methods={"labels": (dm.label_recovery("llg"),), "features": (), "maps": (), "attacks": (DIRECTION,)},
    )
    records = run_suite(subject, suite).records
    assert [(record.method, record.config["adaptive"]) for record in records[1:]] == [
        ("inverting_gradients", True),
        ("inverting_gradients", False),
    ]
    assert records[1].details["counters"] == ["pruning: only entries that survived are matched, 10.0% of the update"]
    assert records[2].details["counters"] == ["not adapted to the defenses"]
    assert records[0].details["counters"] == ["pruning: llg has no counter of its own here"]
    assert len({record.key for record in records}) == 3
    alone = run_suite(subject, Suite(**{**vars(suite), "adaptive": False})).records
    assert [record.config["adaptive"] for record in alone] == [False, False]
    undefended = run_suite(subject, Suite(**{**vars(suite), "defenses": ()})).records
    assert [record.config["adaptive"] for record in undefended] == [False, False]
    assert "counters" not in undefended[1].details


def test_the_adaptive_attack_sees_through_soteria(subject):
    """Sun et al.'s defense moves one layer; who leaves it out of the matching gets the pictures."""
    attack, soteria = dm.attack("inverting_gradients", steps=120), dm.defense("soteria", ratio=0.4)
    plain, adaptive = (
        statistics.median(run(subject, Measurement(method=attack, defenses=(soteria,), adaptive=which)).metrics["psnr"])
        for which in (False, True)
    )
    assert adaptive > plain + 5


def test_the_same_start_with_and_without(subject):
    """An idle counter gives the plain attack, bit for bit."""
    idle = (dm.defense("pruning", ratio=0.0),)
    plain, adaptive = (run(subject, Measurement(method=DIRECTION, defenses=idle, adaptive=which)) for which in (False, True))
    assert plain.metrics["psnr"] == adaptive.metrics["psnr"]


def test_refusals(classifier, batch):
    private = dm.observe(
        classifier, batch, defenses=(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.1), dm.defense("pruning", ratio=0.5))
    )
    adapted = adapt(DIRECTION, private)
    assert not adapted.changed
    assert adapted.notes[-1] == "nothing more is replayed, as clipped_sgd has no replayable form"
    featured = dm.attack("inverting_gradients", features="subspace")
    pruned = dm.observe(classifier, batch, defenses=(dm.defense("pruning", ratio=0.5),))
    assert not adapt(featured, pruned).changed
    assert {name for name in ATTACKS if ATTACKS.entry(name).matches != "nothing"} >= {"dlg", "inverting_gradients"}


def _misfit(exposure, replayed) -> float:
    """‖replayed − sent‖ / ‖sent‖ over the layers given."""
    error = sum(float((change - exposure.update[name]).square().sum()) for name, change in replayed.items())
    return (error / sum(float(exposure.update[name].square().sum()) for name in replayed)) ** 0.5


def _norm(update) -> float:
    return sum(float(change.square().sum()) for change in update.values()) ** 0.5


@pytest.mark.parametrize(("name", "ratio"), [("pruning", 0.9), ("soteria", 0.5)])
def test_noise_that_fills_what_was_emptied_leaves_no_counter(classifier, batch, name, ratio):
    emptied, noise = dm.defense(name, ratio=ratio), dm.defense("gaussian_noise", std=1e-5)
    adapted = adapt(WHOLE, dm.observe(classifier, batch, defenses=(emptied, noise)))
    assert not adapted.changed
    assert "the noise after it fills what it emptied" in adapted.notes[0]
    other_way_round = adapt(WHOLE, dm.observe(classifier, batch, defenses=(dm.defense("gaussian_noise", std=0.0), emptied)))
    assert other_way_round.changed


def test_a_full_rank_leaves_no_counter(classifier, batch):
    adapted = adapt(WHOLE, dm.observe(classifier, batch, defenses=(dm.defense("low_rank", rank=10**9),)))
    assert not adapted.changed
    assert adapted.notes == ("low_rank: takes nothing out at this rank",)


@pytest.mark.parametrize("mode", ["norm", "layer", "value"])
@pytest.mark.parametrize("bound", [1e30, 1e300, math.inf])
def test_a_bound_that_nothing_reaches_is_replayed_as_none(classifier, batch, mode, bound):
    seen = adapt(WHOLE, dm.observe(classifier, batch, defenses=(dm.defense("clipping", max_norm=bound, mode=mode),))).exposure
    assert _misfit(seen, seen.public.training(seen.model, batch.inputs, batch.targets, seen.public.loss)) < 1e-6
