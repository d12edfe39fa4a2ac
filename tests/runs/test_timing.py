"""The time of an audit: forecasts from a few steps, fair shares, and what does not fit is cut and said."""

import dataclasses

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.models.transformer import Transformer
from dosimeter.progress import advance
from dosimeter.records import read_records
from dosimeter.registry import ATTACKS
from dosimeter.runs import timing
from dosimeter.runs.timing import Forecast, Timetable, cut_steps, forecast, share_time

ATTACK = dm.attack("inverting_gradients", steps=400)
BATCH = dm.Batch(torch.rand(4, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([3, 1, 4, 1]))
ONLY = {"labels": ["ilrg"], "features": [], "maps": []}


@pytest.fixture
def clock(monkeypatch):
    """A clock that stands still unless it is moved."""
    now = [0.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now[0])
    return now


def test_time_is_shared_fairly():
    assert share_time([10.0, 10.0], 100.0) == [10.0, 10.0]
    assert share_time([1.0, 50.0, 50.0], 21.0) == [1.0, 10.0, 10.0]
    assert share_time([50.0, 4.0, 50.0, 2.0], 16.0) == [5.0, 4.0, 5.0, 2.0]
    assert share_time([3.0], -1.0) == [0.0]
    assert share_time([], 5.0) == []


@pytest.mark.parametrize("seconds", [1.0, 7.7, 13.0, 40.0, 99.0])
def test_nobody_gets_more_than_wanted_and_nothing_is_wasted(seconds):
    wanted = [9.0, 1.0, 30.0, 5.5, 0.0]
    shares = share_time(wanted, seconds)
    assert all(share <= want for share, want in zip(shares, wanted))
    assert sum(shares) == pytest.approx(min(seconds, sum(wanted)))


def test_steps_are_cut_to_what_fits_on_a_coarse_scale():
    expected = Forecast(setup=1.0, each=0.1, steps=400, runs=2)
    assert expected.seconds == pytest.approx(82.0)
    assert cut_steps(ATTACK, expected, 82.0) is ATTACK
    for seconds in (60.0, 40.0, 12.0):
        fitted = cut_steps(ATTACK, expected, seconds)
        assert dataclasses.replace(expected, steps=fitted.steps).seconds <= seconds
        assert fitted.steps >= 0.7 * ((seconds / 2 - 1) / 0.1)  # no more than the scale's step is given away
    assert cut_steps(ATTACK, expected, 50.0).steps == cut_steps(ATTACK, expected, 52.0).steps
    assert cut_steps(ATTACK, expected, 3.0) is None
    assert cut_steps(ATTACK, Forecast(setup=30.0), 10.0) is None  # nothing to cut


def test_a_forecast_times_one_step_and_knows_the_rest(classifier, batch, monkeypatch, clock):
    exposure = dm.observe(classifier, batch)
    taken = []

    def slow(self, exposure, labels, rng):
        clock[0] += 2.0
        for step in range(self.steps):
            advance(step, self.steps)
            taken.append(step)
            clock[0] += 0.5

    monkeypatch.setattr(type(ATTACK), "__call__", slow)
    assert forecast(ATTACK, exposure, 0) == Forecast(setup=2.0, each=0.5, steps=400, runs=2)
    assert taken == [0]  # one step
    assert forecast(dm.label_recovery("ilrg"), exposure, 0) == Forecast()


def test_the_training_of_a_decoder_is_timed_by_two_of_its_steps(classifier, batch, monkeypatch, clock):
    decoding = dm.attack("generative_prior", steps=60)

    def trains_first(self, exposure, labels, rng):
        for step in range(1, 1001):
            clock[0] += 0.25
            advance(step, 1000, "training the decoder")
        raise AssertionError

    monkeypatch.setattr(type(decoding), "__call__", trains_first)
    auxiliary = dm.Batch(batch.inputs, batch.targets)
    found = forecast(decoding, dm.observe(classifier, batch, auxiliary=auxiliary), 0)
    assert found == Forecast(training=0.25 + 0.25 * 1000)


def test_a_decoder_is_cut_once_and_shared(clock):
    timetable = Timetable(limit=100.0)
    first, second = dm.attack("fgla", width=8), dm.attack("rgla", width=8)
    timetable.expected = {id(first): Forecast(training=400.0), id(second): Forecast(training=400.0)}
    assert timetable.seconds_for([first, second]) == 400.0  # trained once
    fitted, said = timetable.fit(first, [second])
    assert fitted.training_seconds == 100.0
    assert said == "fgla cut to 100 s of training its decoder, to keep max_seconds = 100"
    clock[0] = 90.0
    timetable.expected[id(second)] = Forecast(setup=1.0)  # timed anew, with the decoder
    fitted, said = timetable.fit(second, [])
    assert (fitted.training_seconds, said) == (100.0, "rgla cut to 100 s of training its decoder, to keep max_seconds = 100")
    assert cut_steps(first, Forecast(training=400.0), 49.0) is None  # too little to learn anything
    assert cut_steps(first, Forecast(training=400.0), 51.0).training_seconds == pytest.approx(50.0)


def test_a_method_that_nobody_timed_yet_may_want_any_time(clock):
    timetable = Timetable(limit=100.0)
    timed, unknown = dm.attack("dlg", steps=300), dm.attack("inverting_gradients", steps=400)
    timetable.expected = {id(timed): Forecast(each=1.0, steps=300)}
    assert timetable.fit(timed, [unknown])[0].steps == 38  # half of the time, rounded down
    assert timetable.seconds_for([timed, unknown]) == 300.0


@pytest.fixture
def photographs():
    """A model for images of 96 pixels, and a batch with auxiliary images."""
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 8, 3, stride=4), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 10)).eval()
    images, labels = torch.rand(72, 3, 96, 96, generator=torch.Generator().manual_seed(0)), torch.arange(72) % 10
    return model, dm.Batch(images[:2], labels[:2]), dm.Batch(images[8:], labels[8:])


@pytest.fixture
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_quick_audit_trains_no_decoder_that_takes_long_and_says_so_beforehand(photographs, own_cache, monkeypatch, tmp_path):
    model, batch, auxiliary = photographs
    exposure = dm.observe(model, batch, auxiliary=auxiliary)
    attack = dm.attack("rgla", features="subspace", width=32)
    whole = attack.cost_of_training(exposure).seconds(30)
    monkeypatch.setattr(timing, "QUICK_TRAINING_SECONDS", 1.01 * whole)
    assert timing.quick_training(attack, exposure) == (attack, "")
    monkeypatch.setattr(timing, "QUICK_TRAINING_SECONDS", 0.5 * whole)
    fitted, said = timing.quick_training(attack, exposure)
    assert 13 <= fitted.epochs <= 15
    assert said.startswith(f"rgla cut to {fitted.epochs} of 30 epochs of training: its decoder takes about")
    monkeypatch.setattr(timing, "QUICK_TRAINING_SECONDS", 0.2 * whole)
    assert timing.quick_training(attack, exposure)[0] is None
    assert timing.quick_training(dm.attack("rgla", decoder="mine.safetensors"), exposure)[1] == ""
    monkeypatch.setattr("dosimeter.engines.decoder.cache.train_decoder", lambda *_, **__: pytest.fail("trained"))
    others = {"labels": [], "features": [], "maps": []}
    for resumed in (0, 3):
        report = dm.audit(model, batch, auxiliary=auxiliary, out=tmp_path / "out", **others)
        drawn = {record.method: record for record in report.records if record.method in ("fgla", "generative_prior", "rgla")}
        assert {record.verdict for record in drawn.values()} == {"not attempted"}
        assert "left out of the quick audit: its decoder takes about" in drawn["rgla"].reason
        assert sum(cut.startswith(("fgla", "generative_prior", "rgla")) for cut in report.cuts) == 3
        assert report.resumed >= resumed
    assert len({record.key for record in read_records(tmp_path / "out")}) == len(read_records(tmp_path / "out")) == len(report.records)


def test_a_decoder_in_the_cache_costs_nothing(photographs, own_cache):
    model, batch, auxiliary = photographs
    exposure = dm.observe(model, batch, auxiliary=auxiliary)
    attack = dm.attack("rgla", features="subspace", width=2, epochs=1)
    assert attack.cost_of_training(exposure).epoch > 0
    dm.reconstruct(exposure, attack)
    assert attack.cost_of_training(exposure) is None


def test_a_method_that_runs_long_after_the_limit_is_stopped(classifier, batch, monkeypatch):
    def never_ends(self, exposure, labels, rng):
        for step in range(10**9):
            advance(step, 10**9)

    monkeypatch.setattr(type(ATTACK), "__call__", never_ends)
    monkeypatch.setattr(timing, "forecast", lambda *_: Forecast())
    report = dm.audit(classifier, batch, attacks=[ATTACK], max_seconds=1.0, progress=None, **ONLY)
    assert report.records[-1].verdict == "not attempted"
    assert "stopped after" in report.records[-1].reason
    assert len(report.cuts) == 1


def test_a_real_forecast_is_of_the_order_of_the_run(classifier, batch):
    exposure = dm.observe(classifier, batch)
    expected = forecast(ATTACK, exposure, 0)
    assert (expected.steps, expected.runs) == (400, 2)
    assert 0 < expected.each < 1


def test_a_method_that_refuses_needs_no_time(classifier, batch):
    exposure = dm.observe(classifier, batch)
    assert forecast(dm.attack("gradinversion"), exposure, 0).seconds == 0.0  # no batch norm


def test_what_does_not_fit_is_cut_and_what_comes_too_late_is_left_out(clock):
    timetable = Timetable(limit=100.0)
    other = dm.attack("dlg", steps=300)
    timetable.expected = {id(ATTACK): Forecast(each=0.5, steps=400, runs=2), id(other): Forecast(each=0.1, steps=300)}
    fitted, said = timetable.fit(ATTACK, [other])
    assert fitted.steps == 50  # 70 s for two runs, rounded down
    assert said == "inverting_gradients cut to 50 of 400 steps, to keep max_seconds = 100"
    clock[0] = 95.0
    fitted, said = timetable.fit(ATTACK, [])
    assert fitted is None
    assert said.startswith("inverting_gradients left out: it takes about")
    clock[0] = 101.0
    assert timetable.fit(dm.label_recovery("ilrg"), [])[1] == "ilrg left out: max_seconds = 100 had passed"
    assert len(timetable.cuts) == 3


def test_an_audit_within_a_limit_says_what_it_cut_and_a_longer_one_makes_up_for_it(classifier, batch, tmp_path):
    short = dm.audit(classifier, batch, attacks=[ATTACK], max_seconds=1e-3, out=tmp_path, **ONLY)
    assert len(short.cuts) == 2
    assert {(record.outcome, record.verdict) for record in short.records} == {("not attempted", "not attempted")}
    assert "max_seconds" in short.records[1].reason
    attack = dm.attack("inverting_gradients", steps=4)
    whole = dm.audit(classifier, batch, attacks=[attack], max_seconds=60, out=tmp_path, **ONLY)
    assert whole.cuts == ()
    assert whole.resumed == 0
    assert [record.outcome for record in whole.records] == ["completed", "completed"]
    assert {record.method: record.outcome for record in read_records(tmp_path)}["ilrg"] == "completed"


def test_the_time_of_the_attacks_is_known_from_the_first_label_recovery_on(classifier, batch, monkeypatch):
    quick = dataclasses.replace(ATTACK, steps=2)
    expected = {"inverting_gradients": Forecast(each=50.0, steps=2)}
    monkeypatch.setattr(timing, "forecast", lambda method, *_: expected.get(method.name, Forecast()))
    seen = []
    dm.audit(classifier, batch, labels=["ilrg", "idlg"], features=[], maps=[], attacks=[quick], ceilings=False, progress=seen.append)
    assert [(one.method, one.timed) for one in seen[:2]] == [("inverting_gradients", True), ("ilrg", False)]
    assert seen[1].left == 100.0
    assert {one.left for one in seen if one.method == "idlg"} == {100.0}


@pytest.mark.parametrize("limit", [0, -3.0, float("inf"), float("nan")])
def test_a_limit_is_a_positive_number(classifier, batch, limit):
    with pytest.raises(ValueError, match="max_seconds: expected a positive number of seconds"):
        dm.audit(classifier, batch, attacks=[], max_seconds=limit, **ONLY)


def test_a_foreign_null_is_spared_only_where_it_cannot_change_the_verdict(classifier, batch, monkeypatch):
    hopeless = {"labels": ["ilrg"], "features": [], "maps": [], "attacks": [dm.attack("inverting_gradients", steps=1)]}
    quick = dm.audit(classifier, batch, **hopeless).records[-1]
    full = dm.audit(classifier, batch, budget="published", **hopeless).records[-1]
    assert quick.details["spared_nulls"] == ["foreign"]
    assert "foreign" not in quick.nulls
    assert "foreign" in full.nulls
    assert quick.verdict == full.verdict == "not shown at this budget"
    assert quick.metrics == full.metrics


def test_a_text_counts_with_all_its_tokens():
    model = Transformer("gpt2", vocabulary=50, width=16, layers=1, heads=2, positions=64, classes=2)
    ids = torch.randint(50, (2, 64), generator=torch.Generator().manual_seed(0))
    for inputs in (lambda length: ids[:, :length], lambda length: {"input_ids": ids[:, :length]}):
        short, long = (dm.observe(model, dm.Batch(inputs(length), torch.tensor([0, 1]))) for length in (2, 64))
        assert timing.seconds_a_step(long) > 1.2 * timing.seconds_a_step(short)


def test_a_quick_audit_gives_large_models_fewer_steps_by_a_count_that_no_clock_changes():
    small, large = (dm.observe(nn.Sequential(nn.Flatten(), nn.Linear(64, h), nn.Linear(h, 10)), BATCH) for h in (8, 30_000))
    assert timing.seconds_a_step(small) < 1e-3
    step = timing.seconds_a_step(large)
    assert step == timing.seconds_a_step(large)
    assert step == pytest.approx(timing.SECONDS_A_PARAMETER * 30_000 * 75, rel=0.05)  # 64 inputs, a bias and 10 outputs a unit
    labels = dm.label_recovery("ilrg")
    assert timing.within_quick_budget([ATTACK, labels], timing.seconds_a_step(small)) == ([ATTACK, labels], {})
    (cut, same), _ = timing.within_quick_budget([ATTACK, labels], 0.2)
    assert (cut.steps, same) == (60, labels)
    assert timing.within_quick_budget([dataclasses.replace(ATTACK, restarts=2)], 0.2)[0][0].steps == 30
    assert timing.within_quick_budget([ATTACK], 1e9)[0][0].steps == timing.FEWEST_STEPS


@pytest.mark.parametrize(
    ("step", "starts_and_steps", "left_out"),
    [
        (0.001, {"dlg": (2, 300), "gradinversion": (2, 200), "inverting_gradients": (1, 400), "sapag": (1, 300)}, []),
        (0.1, {"dlg": (2, 60), "gradinversion": (2, 60), "inverting_gradients": (1, 120)}, ["sapag"]),
        (1.1, {"dlg": (1, 10), "gradinversion": (1, 10), "inverting_gradients": (1, 10)}, ["sapag"]),
        (3.0, {"inverting_gradients": (1, 10)}, ["dlg", "gradinversion", "sapag"]),
    ],
)
def test_matching_attacks_share_the_quick_time_in_the_order_of_their_ranks(step, starts_and_steps, left_out):
    methods = [dm.attack(name, **ATTACKS.entry(name).quick) for name in ("dlg", "gradinversion", "inverting_gradients", "sapag")]
    fitted, sentences = timing.within_quick_budget(methods, step)
    assert [methods[position].name for position in sorted(sentences)] == left_out
    assert {m.name: (m.restarts, m.steps) for i, m in enumerate(fitted) if i not in sentences} == starts_and_steps
    assert sum(m.restarts * m.steps * step for i, m in enumerate(fitted) if i not in sentences) <= timing.QUICK_MATCHING_SECONDS + 10 * step


def test_an_attack_that_a_quick_audit_leaves_out_says_so(classifier, batch, monkeypatch):
    monkeypatch.setattr("dosimeter.runs.audit.seconds_a_step", lambda _: 3.0)
    monkeypatch.setattr("dosimeter.runs.timing.FEWEST_STEPS", 2)
    monkeypatch.setattr("dosimeter.runs.timing.QUICK_MATCHING_SECONDS", 6.0)
    report = dm.audit(classifier, batch, labels=["ilrg"], features=[], maps=[], ceilings=False, progress=None)
    said = {record.method: record.reason for record in report.records if record.surface == "inputs"}
    ran = {record.method for record in report.records if record.surface == "inputs" and record.metrics}
    assert "inverting_gradients" in ran
    assert said["dlg"].startswith("dlg left out of the quick audit: 2 steps take about")
    assert sum(cut.startswith("dlg left out") for cut in report.cuts) == 1


def test_simulated_clients_have_fewer_probes_in_a_quick_audit_or_are_left_out(classifier, batch, monkeypatch):
    rlu = dm.label_recovery("rlu", rounds=1, simulations=32)
    auxiliary = dm.Batch(torch.rand(64, *batch.inputs.shape[1:]), torch.arange(64) % 10)
    exposure = dm.observe(classifier, batch, auxiliary=auxiliary)
    size = len(batch.inputs)
    whole = 33 * 64 + 32 * 3 * size  # forward passes

    def fit(share):
        step = timing.FORWARDS_A_STEP * size * timing.QUICK_SIMULATION_SECONDS / (share * whole)
        return timing.quick_simulation(rlu, step, exposure)

    assert fit(1.01) == (rlu, "")
    cut, said = fit(0.5)
    assert sum(cut.forwards(exposure)) <= 0.5 * whole < sum(dataclasses.replace(cut, probes=cut.probes + 1).forwards(exposure))
    assert said.startswith(f"rlu cut to {cut.probes} auxiliary samples as probes: its simulated clients take about")
    left_out, said = fit(0.1)
    assert left_out is None
    assert said.endswith("labels=['rlu'] or the published budget runs it")
    ilrg = dm.label_recovery("ilrg")
    assert timing.quick_simulation(ilrg, 1e9, exposure) == (ilrg, "")
    monkeypatch.setattr("dosimeter.runs.audit.seconds_a_step", lambda _: 100.0)
    report = dm.audit(classifier, batch, auxiliary=auxiliary, features=[], maps=[], attacks=[], ceilings=False, progress=None)
    (record,) = (record for record in report.records if record.method == "rlu")
    assert record.reason.startswith("rlu left out of the quick audit")
    assert record.reason in report.cuts


@pytest.mark.parametrize("training", [None, dm.FedAvg(steps=4, learning_rate=0.1)], ids=["one step", "four steps"])
def test_simulated_updates_are_fewer_in_a_quick_audit_or_left_out(classifier, batch, training):
    auxiliary = dm.Batch(torch.rand(64, *batch.inputs.shape[1:]), torch.arange(64) % 10)
    exposure = dm.observe(classifier, batch, training=training, auxiliary=auxiliary)
    attack = dm.attack("learning_to_invert", simulations=400)

    def fit(share):  # of the simulations, so many fit
        step = 2 * timing.QUICK_SIMULATION_SECONDS / (400 * share) / (1 if training is None else 4)
        return timing.quick_simulation(attack, step, exposure)

    assert fit(1.01) == (attack, "")
    cut, said = fit(0.5001)
    assert cut == dataclasses.replace(attack, simulations=200)
    assert said.startswith("learning_to_invert cut to 200 of 400 simulated updates: its simulated clients take about 48.0\u202fs")
    left_out, said = fit(0.1)
    assert left_out is None
    assert said.endswith("attacks=['learning_to_invert'] or the published budget runs it")


def test_convolutions_count_by_their_operations():
    model = nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(256, 10))
    flops = 2 * (4 * 9 * 64 + 256 * 10) * len(BATCH.inputs)
    parameters = 4 * 9 + 4 + 2560 + 10
    expected = timing.FORWARDS_A_STEP * flops / timing.FLOPS_A_SECOND + timing.SECONDS_A_PARAMETER * parameters
    assert timing.seconds_a_step(dm.observe(model, BATCH)) == pytest.approx(expected, rel=1e-6)


def test_what_begins_with_long_work_is_timed_under_a_limit_alone(monkeypatch):
    exposure = dm.observe(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), BATCH)
    maps, dlg, ilrg = dm.attack("maps", steps=3), dm.attack("dlg", steps=3), dm.label_recovery("ilrg")
    timed, told = [], []
    monkeypatch.setattr(timing, "forecast", lambda method, *_: timed.append(method.name) or timing.Forecast())
    Timetable().time_steps([ilrg, maps, dlg], exposure, 0, told.append)
    assert (timed, told) == (["ilrg", "dlg"], ["dlg"])
    Timetable(600.0).time_steps([maps], exposure, 0, told.append)
    assert (timed[2:], told[1:]) == (["maps"], ["maps"])


def test_a_resumed_audit_times_what_is_left_alone(classifier, batch, tmp_path):
    quick = [dm.attack(name, steps=2) for name in ("dlg", "inverting_gradients")]
    chosen = {"labels": ["ilrg"], "features": [], "maps": [], "ceilings": False, "out": tmp_path}
    seen = []
    dm.audit(classifier, batch, attacks=quick[:1], progress=None, **chosen)
    dm.audit(classifier, batch, attacks=quick, progress=seen.append, **chosen)
    assert [one.method for one in seen if one.timed] == ["inverting_gradients"]
