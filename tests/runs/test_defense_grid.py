import gc
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.config import construct
from dosimeter.records import FILE_NAME, read_records
from dosimeter.registry import DEFENSES
from dosimeter.report.settings import group_by_setting
from dosimeter.runs.audited_client import prepare
from dosimeter.runs.defense_grid import DefenseGrid, SmallImages, grid_of, run_grid
from dosimeter.runs.utility import Federation
from dosimeter.types import Refused

TINY = {
    "adaptive": False,
    "batches": 1,
    "methods": {
        "labels": (dm.label_recovery("ilrg"),),
        "features": (),
        "maps": (),
        "attacks": (dm.attack("inverting_gradients", steps=2),),
    },
    "federation": Federation(clients=2, rounds=2, batch_size=8),
}
CELLS = ((dm.defense("pruning", ratio=0.9),), (dm.defense("clipping", max_norm=1.0), dm.defense("gaussian_noise", std=0.1)))


@pytest.fixture(scope="module")
def subject():
    grid = DefenseGrid()
    return prepare(grid.model, grid.data, seed=1)


def without_time(record):
    times = ("update_seconds", "time_ratio")
    kept = {name: values for name, values in record.metrics.items() if name not in times}
    return record.key, record.surface, record.method, record.verdict, kept


def test_all_is_every_defense_that_says_its_strengths():
    cells = DefenseGrid().cells
    assert cells[0] == ()
    named = {name: len(DEFENSES.entry(name).strengths) for name in DEFENSES if DEFENSES.entry(name).strengths}
    assert Counter(cell[0].name for cell in cells[1:]) == named
    assert named.items() >= {"gaussian_noise": 2, "clipping": 2, "dpsgd": 2}.items()


def test_every_cell_has_its_leaks_and_its_cost(subject, tmp_path):
    result = run_grid(subject, DefenseGrid(grid=CELLS, **TINY), out=tmp_path)
    assert [record.surface for record in result.records] == ["labels", "inputs", "utility"] * 3
    costs = result.records[2::3]
    assert [len(record.threat_model["defenses"]) for record in costs] == [0, 1, 2]
    assert costs[0].metrics["accuracy_kept"] == [1.0]
    assert costs[1].metrics["accuracy_kept"][0] == pytest.approx(costs[1].metrics["accuracy"][0] / costs[0].metrics["accuracy"][0])
    assert costs[1].metrics["bytes_ratio"][0] < 0.2 < costs[2].metrics["bytes_ratio"][0] == 1.0
    assert costs[0].metrics["epsilon"] == costs[1].metrics["epsilon"] == [None]
    assert costs[2].metrics["epsilon"][0] == pytest.approx(costs[2].details["guarantees"][0]["epsilon"])
    assert [without_time(record) for record in read_records(tmp_path)] == [without_time(record) for record in result.records]
    assert {verdict.surface for verdict in result.verdicts} == {"labels", "inputs"}


def test_a_killed_grid_resumes_without_repeating(subject, tmp_path):
    grid = DefenseGrid(grid=CELLS, **TINY)
    whole = run_grid(subject, grid)

    def kill_in_the_second_training(progress):
        if (progress.position, progress.method) == (1, "pruning: utility"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_grid(subject, grid, out=tmp_path, progress=kill_in_the_second_training)
    left = (tmp_path / FILE_NAME).read_bytes()
    assert len(left.splitlines()) == 5
    (tmp_path / FILE_NAME).write_bytes(left + b'{"key": "torn')
    seen = []
    resumed = run_grid(subject, grid, out=tmp_path, progress=lambda progress: seen.append(progress.position))
    assert min(seen) == 1
    assert [without_time(record) for record in resumed.records] == [without_time(record) for record in whole.records]
    assert (tmp_path / FILE_NAME).read_bytes().startswith(left)


def test_a_defense_that_cannot_be_there_is_a_finding(subject):
    grid = DefenseGrid(grid=((dm.defense("secure_aggregation", clients=9),), (dm.defense("dropout"),)), **TINY)
    result = run_grid(subject, grid)
    assert [record.surface for record in result.records] == ["labels", "inputs", "utility", "utility", "utility"]
    assert [record.outcome for record in result.records[2:]] == ["completed", "not attempted", "not attempted"]
    assert "needs a sample for each" in result.records[3].reason
    assert "train mode only" in result.records[4].reason


def test_behind_a_withheld_head_the_methods_that_do_without_it_run_too(subject):
    grid = DefenseGrid(grid=((dm.defense("head_withheld"),),), **{**TINY, "adaptive": True})
    records = [r for r in run_grid(subject, grid).records if r.threat_model["defenses"] and r.surface != "utility"]
    assert {"gradient_bridge", "dlg"} <= {record.method for record in records}
    joint = next(record for record in records if record.method == "dlg")
    assert joint.outcome != "not attempted"  # it needs neither the head nor labels
    plain = run_grid(subject, DefenseGrid(grid=((dm.defense("head_withheld"),),), **TINY)).records
    assert not {"gradient_bridge", "dlg"} & {record.method for record in plain}


def test_what_is_always_in_force_stands_before_the_cells_own():
    always = dm.defense("clipping", max_norm=1.0)
    cells = DefenseGrid(defenses=(always,), grid=((dm.defense("pruning", ratio=0.5),), ())).cells
    assert [[defense.name for defense in cell] for cell in cells] == [["clipping"], ["clipping", "pruning"]]


def test_a_toml_grid():
    data = {"grid": [[{"name": "pruning", "ratio": 0.5}], [{"name": "sign"}, {"name": "low_rank", "rank": 2}]], "data": {"batch_size": 2}}
    grid = construct(DefenseGrid, data)
    assert [[defense.name for defense in cell] for cell in grid.cells] == [[], ["pruning"], ["sign", "low_rank"]]
    assert (grid.data.name, grid.data.batch_size) == ("digits", 2)
    assert isinstance(grid.data, SmallImages)
    with pytest.raises(ValueError, match=r"grid\[0\]\[0\]: .* did you mean 'pruning'"):
        construct(DefenseGrid, {"grid": [[{"name": "prunning"}]]})


def test_named_defenses():
    assert grid_of("all") == "all"
    assert [cell[0].ratio for cell in grid_of("pruning, soteria")] == [0.9, 0.99, 0.4, 0.9]
    with pytest.raises(ValueError, match="defenses: no defense named 'prune'"):
        grid_of("prune")
    (alone,) = grid_of("sign")
    assert alone == (dm.defense("sign"),)
    given = grid_of("gaussian_noise:std=0.1, dpsgd:max_norm=1:noise_multiplier=0.5,only_layer:layer=fc")
    assert given == (
        (dm.defense("gaussian_noise", std=0.1),),
        (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.5),),
        (dm.defense("only_layer", layer="fc"),),
    )
    with pytest.raises(ValueError, match="'only_layer' has no usual strength"):
        grid_of("only_layer")
    with pytest.raises(ValueError, match=r"defenses.std: expected .*, got -1"):
        grid_of("gaussian_noise:std=-1")
    with pytest.raises(ValueError, match="unknown option 'strength'"):
        grid_of("gaussian_noise:strength=1")
    with pytest.raises(ValueError, match="defenses: expected all"):
        grid_of(" , ")


def test_every_registered_defense_can_be_named():
    for name in DEFENSES:
        try:
            assert grid_of(name)
        except ValueError as refusal:
            assert f"{name}:" in str(refusal)  # noqa: PT017


def test_a_grid_rests_on_several_batches(subject, tmp_path):
    methods = TINY["methods"] | {"attacks": ()}
    grid = DefenseGrid(**{**TINY, "batches": 3, "methods": methods, "grid": ((dm.defense("pruning", ratio=0.9),),)})
    result = run_grid(subject, grid, out=tmp_path)
    assert [record.surface for record in result.records] == ["labels", "labels", "labels", "utility"] * 2
    drawn = {record.config["subject"]["batch_hash"] for record in result.records if record.surface == "labels"}
    assert len(drawn) == 3
    assert [record.seed for record in result.records] == [0, 1, 2, 0] * 2
    again = run_grid(subject, grid, out=tmp_path)
    assert [record.key for record in again.records] == [record.key for record in result.records]
    assert len((tmp_path / FILE_NAME).read_bytes().splitlines()) == 8
    assert len(group_by_setting(result.records)) == 2


def test_the_undefended_subject_must_be_sound():
    grid = DefenseGrid(**{**TINY, "methods": {**TINY["methods"], "attacks": ()}})
    subject = prepare(grid.model, grid.data)
    headless = torch.nn.Sequential(torch.nn.Conv2d(1, 10, 8), torch.nn.Flatten())
    with pytest.raises(Refused, match="has no linear layer"):
        run_grid(type(subject)(model=headless, batch=subject.batch), grid)


WORDS = [
    'labels=["ilrg"]',
    "features=[]",
    "maps=[]",
    'attacks=[{name="inverting_gradients", steps=2}]',
    "federation.rounds=2",
    "federation.batch_size=8",
    "batches=1",
]


def test_the_command_line_gates(tmp_path, capsys):
    common = ["audit", *WORDS, "--defenses", "pruning", "--out", str(tmp_path), "--json"]
    assert main([*common, "--fail-on", "inputs.psnr.median > 99"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [record["surface"] for record in said["records"]].count("utility") == 3
    assert said["failures"] == []
    assert main([*common, "--fail-on", "labels.insacc.median >= 0"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("dosimeter: failed on labels.insacc.median >= 0: ilrg gave")
    assert captured.err.count("\n") == 1
    assert main([*common, "--fail-on", "inputs.psnr > 20"]) == 2
    assert main([*common[:-1], "--fail-on", "labels.insacc.median > 2"]) == 0
    assert "what to switch on" in capsys.readouterr().out


def test_bad_grammar_writes_nothing(tmp_path):
    assert main(["audit", "--out", str(tmp_path / "new"), "--fail-on", "nonsense"]) == 2
    assert main(["audit", "--out", str(tmp_path / "new"), "--defenses", "nonsense"]) == 2
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_memory_stays_flat_over_a_hundred_experiments(subject, tmp_path):
    """Within 10 % from the twentieth experiment to the hundredth, by what the process holds."""
    resource_page = 4096
    grid = DefenseGrid(**TINY)
    held = []
    for seed in range(100):
        run_grid(subject, DefenseGrid(**{**vars(grid), "seed": seed, "grid": ()}), out=tmp_path / str(seed))
        gc.collect()
        held.append(int(Path("/proc/self/statm").read_text().split()[1]) * resource_page)
    assert max(held[20:]) < 1.1 * held[20]
