"""A surface is one file: a toy surface, registered here alone, is measured and treated by everything that knows surfaces.

Its methods run in experiments and audits, from Python, from a file and from the command line, without any other edit.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
import dosimeter.config
from dosimeter.cli import main
from dosimeter.config import construct, describe
from dosimeter.interfaces import Metric, Recovery
from dosimeter.listing import catalogue
from dosimeter.registry import METRICS, REGISTRY_OF, Registry
from dosimeter.report.cells import cells_of
from dosimeter.report.findings import findings, headline
from dosimeter.report.page import render
from dosimeter.runs.audit import Audit, Suite
from dosimeter.runs.audited_client import Experiment, client_from
from dosimeter.runs.defense_grid import DefenseGrid
from dosimeter.runs.experiment import run
from dosimeter.runs.gate import furthest_trip, parse_condition
from dosimeter.surfaces.judging import judge_surfaces
from dosimeter.surfaces.scores import Scores, compare_samples
from dosimeter.surfaces.surface import SURFACES, Surface, surface_names
from dosimeter.surfaces.verdicts import UTILITY, Verdict
from dosimeter.terminal import audit as audit_terminal
from dosimeter.types import Estimate, Record


@dataclass(frozen=True, kw_only=True)
class BrightnessEstimate(Estimate):
    """How bright each sample is."""

    brightness: Tensor  # (B,)


@dataclass(frozen=True, kw_only=True)
class BrightnessGap(Metric):
    """How far a recovered brightness is from the true one."""

    name: ClassVar[str] = "brightness_gap"
    surface: ClassVar = "brightness"
    higher_is_better: ClassVar[bool] = False
    title: ClassVar[str] = "Gap of brightness"

    def __call__(self, recovered: Tensor, truth: Tensor) -> Tensor:
        return (recovered - truth).abs()


@dataclass(frozen=True, kw_only=True)
class BrightnessRecovery(Recovery):
    """Recovers how bright each sample is."""


@dataclass(frozen=True, kw_only=True)
class Glance(BrightnessRecovery):
    """Looks at the update and says how bright it was.

    Ours, as an example.
    """

    offset: float = 0.0

    def __call__(self, exposure, rng):
        """Says the same of every batch, so that a test knows it."""
        return BrightnessEstimate(brightness=torch.tensor([0.2, 0.62, 0.8, 0.9]) + self.offset)


class Brightness(Surface[BrightnessEstimate]):
    """How bright each private sample is."""

    position = 15
    estimate = BrightnessEstimate
    key = plural = "brightness"
    grid_methods: ClassVar = {"glance": {"offset": 0.5}}
    headline = "brightness_gap"
    plot = "samples"
    takes_labels = False
    description = "How much light fell on each sample."
    if_leaked = "The server can tell day from night."
    if_not_shown = "The server cannot tell day from night yet."
    null_words: ClassVar = {"dusk": ("the light of dusk", "half of full light")}
    share_words = "the share closer than any null"
    counting_words = "A brightness counts as leaked if it is closer than any null."

    def score(self, found, comparison):
        true = comparison.truth.inputs.flatten(1).mean(1)
        in_order = torch.arange(len(true))
        usable = {"brightness_gap": BrightnessGap()}
        return Scores(
            surface=self.name,
            per_metric=compare_samples(usable, found.brightness, true, in_order),
            nulls={"dusk": compare_samples(usable, torch.full_like(true, 0.5), true, in_order)},
            assignment=in_order,
        )

    def judge(self, found, scores, attempts):
        closer = bool((scores["brightness_gap"] < scores.nulls["dusk"]["brightness_gap"]).any())
        return (Verdict.LEAKED, "closer than dusk") if closer else (Verdict.NOT_SHOWN, "dusk is as close")

    def beats_nulls(self, value, rivals):
        return value is not None and value < min(rivals)

    def details(self, found, exposure, truth):
        return {"lamps": 7}

    def facts(self, details):
        return [f"{details['lamps']} lamps seen"]


@pytest.fixture
def brightness(monkeypatch):
    """The surface, its metric and its method, for one test."""
    monkeypatch.setattr(SURFACES, "_entries", dict(SURFACES._entries) if SURFACES.names() else {})
    monkeypatch.setattr(METRICS, "_entries", dict(METRICS._entries) if METRICS.names() else {})
    monkeypatch.setattr("dosimeter.registry.REGISTRY_OF", dict(REGISTRY_OF))
    monkeypatch.setattr("dosimeter.config.REGISTRY_OF", dict(REGISTRY_OF))
    monkeypatch.setattr(Brightness, "methods", Registry("brightness recovery", "dosimeter.surfaces", BrightnessRecovery), raising=False)
    monkeypatch.setitem(dosimeter.config.REGISTRY_OF, BrightnessRecovery, Brightness.methods)
    Brightness.methods.register("glance")(Glance)
    METRICS.register("brightness_gap")(BrightnessGap)
    return SURFACES.register("brightness")(Brightness)()


@pytest.fixture
def truth() -> dm.Batch:
    return dm.Batch(torch.tensor([0.1, 0.6, 0.9, 0.5]).reshape(4, 1, 1, 1).expand(4, 1, 2, 2), torch.arange(4))


@pytest.fixture
def client(truth):
    return client_from(nn.Sequential(nn.Flatten(), nn.Linear(4, 4)).eval(), truth)


@pytest.fixture
def record(brightness, client) -> Record:
    """What an experiment makes of it: three of four samples closer than dusk."""
    return run(client, construct(Experiment, {"brightness": "glance"}).measurement())


def test_an_experiment_names_its_method_under_its_key(brightness):
    experiment = construct(Experiment, {"brightness": {"name": "glance", "offset": 0.25}})
    assert experiment.method == Glance(offset=0.25)
    assert describe(experiment.measurement())["brightness"] == {"name": "glance", "offset": 0.25}
    with pytest.raises(ValueError, match=r"brightness.offset: expected a number"):
        construct(Experiment, {"brightness": {"name": "glance", "offset": "much"}})
    with pytest.raises(ValueError, match="did you mean 'brightness'"):
        construct(Experiment, {"brightnes": "glance"})


def test_an_audit_runs_every_method_of_it(brightness, client):
    others = {"labels": [], "features": [], "maps": [], "attacks": []}
    (record,) = dm.audit(client.model, client.batch, **others).records
    assert (record.surface, record.method, record.verdict) == ("brightness", "glance", "leaked")
    assert record.config["brightness"] == {"name": "glance", "offset": 0.0}
    (named,) = dm.audit(client.model, client.batch, **others, brightness=[Glance(offset=0.5)]).records
    assert named.config["brightness"]["offset"] == 0.5
    assert construct(Suite, {"brightness": ["glance"]}).choice(brightness) == (Glance(),)
    assert DefenseGrid().choice(brightness) == (Glance(offset=0.5),)


def test_the_catalogue_and_the_command_line_list_its_methods(brightness, capsys):
    (entry,) = catalogue("brightness")
    assert (entry["name"], entry["idea"]) == ("glance", "Looks at the update and says how bright it was.")
    assert main(["list", "brightness"]) == 0
    assert "offset: a number, default 0.0" in capsys.readouterr().out
    assert main(["run", "brightness=glance", "data.name=digits", "data.batch_size=4", "--json"]) == 0
    assert '"surface": "brightness"' in capsys.readouterr().out


def test_it_is_listed_at_its_position(brightness):
    assert surface_names() == ("labels", "brightness", "targets", "features", "maps", "inputs", "tokens", "membership")


def test_its_estimate_is_scored_beside_its_null(record):
    assert record.surface == "brightness"
    assert record.metrics["brightness_gap"] == pytest.approx([0.1, 0.02, 0.1, 0.4], abs=1e-6)
    assert record.nulls["dusk"]["brightness_gap"] == pytest.approx([0.4, 0.1, 0.4, 0.0], abs=1e-6)


def test_its_verdict_is_the_gravest_and_a_smaller_gap_is_graver(record):
    dimmer = replace(record, method="squint", metrics={"brightness_gap": [0.39] * 4})
    (verdict,) = judge_surfaces([dimmer, record])
    assert (verdict.surface, verdict.verdict, verdict.method) == ("brightness", Verdict.LEAKED, "glance")
    assert headline(findings([record])).startswith("Brightness leaked")


def test_the_page_has_its_section_plot_words_and_facts(record):
    page = render([replace(record, seconds=1.0)])
    assert "<h2>Brightness</h2>" in page
    for words in (
        "How much light fell on each sample.",
        "The server can tell day from night.",
        "Gap of brightness",
        "the light of dusk",
        "half of full light",
        "Looks at the update and says how bright it was.",
        "7 lamps seen",
        "4 samples",
        "A brightness counts as leaked if it is closer than any null.",
    ):
        assert words in page
    assert page.count('class="score beats"') == 4  # three samples and the key
    assert "labels given" not in page


def test_the_terminal_shows_its_headline_beside_the_best_null(record, capsys, tmp_path):
    audit_terminal.print_audit(Audit(records=(replace(record, seconds=1.0),)), tmp_path)
    heading, row = (line.split() for line in capsys.readouterr().out.splitlines()[1:3])
    assert heading == ["method", "brightness_gap", "best", "null", "s"]
    assert row == ["glance", "0.1", "0.25", "1.0", "leaked"]


def test_the_gate_knows_its_metrics(record):
    condition = parse_condition("brightness.brightness_gap.min < 0.05")
    assert furthest_trip(condition, [record]).value == pytest.approx(0.02, abs=1e-6)
    assert condition.why_untested([record]) is None
    assert "nothing" in condition.why_untested([replace(record, surface="inputs")])
    assert "closer than dusk" in parse_condition("leaked").failure([record])
    with pytest.raises(ValueError, match="metric of brightness out of brightness_gap"):
        parse_condition("brightness.psnr.min < 0.05")


def test_a_grid_cell_counts_its_share_and_the_page_says_of_what(record):
    cost = replace(record, surface=UTILITY, method="federated training", metrics={"accuracy": [0.9], "accuracy_kept": [1.0]}, verdict="")
    (cell,) = cells_of([record, cost])
    assert cell.leaks == {"brightness": 0.75}
    page = render([record, cost])
    assert "Brightness leaked" in page
    assert "of brightness the share closer than any null" in page


def test_nothing_of_it_stays():
    assert surface_names() == ("labels", "targets", "features", "maps", "inputs", "tokens", "membership")
    with pytest.raises(ValueError, match="expected a surface out of"):
        parse_condition("brightness.brightness_gap.min < 0.05")
    with pytest.raises(TypeError, match="got BrightnessEstimate"):
        dm.score(BrightnessEstimate(brightness=torch.zeros(1)), dm.Batch(torch.zeros(1, 1), torch.zeros(1, dtype=torch.int64)))
