"""The README's examples are run as they stand."""

import re
import shlex
from pathlib import Path

from dosimeter.cli import main

README = (Path(__file__).resolve().parents[1] / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_python_quick_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    observe, audit, receive, _method = blocks("python")
    names: dict = {}
    exec(compile(observe, "README.md, first example", "exec"), names)
    assert names["labels"].labels.tolist() == [1, 1, 3, 4]
    exec(compile(audit, "README.md, second example", "exec"), names)
    assert (tmp_path / "out/mine/report.html").is_file()
    exec(compile(receive, "README.md, third example", "exec"), names)
    assert (tmp_path / "out/received/report.html").is_file()
    assert {verdict.surface: verdict.verdict for verdict in names["received"].verdicts}["labels"] == "proved"
    assert "labels" in capsys.readouterr().out


def test_command_line_quick_start(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, text in zip(("audit.toml", "experiment.toml"), blocks("toml"), strict=True):
        assert f"`{name}`" in README
        Path(name).write_text(text, encoding="utf-8")
    commands = [shlex.split(line, comments=True) for block in blocks("sh") for line in block.splitlines() if line.startswith("dosimeter")]
    assert [command[1] for command in commands] == ["audit", "run", "list", "report"]
    for command in commands:
        assert main(command[1:]) == 0, command
    assert (tmp_path / "out/lenet/report.html").is_file()
    assert "inverting_gradients" in capsys.readouterr().out


def test_adding_a_method(classifier, batch):
    import dosimeter as dm
    from dosimeter.registry import LABELS

    names: dict = {"__name__": "largest_row"}
    exec(compile(blocks("python")[3], "README.md, fourth example", "exec"), names)
    try:
        assert "largest_row" in LABELS
        estimate = dm.recover_labels(dm.observe(classifier, batch), "largest_row")
        assert int(estimate.counts.sum()) == len(batch.inputs)
    finally:
        LABELS._entries.pop("largest_row", None)


def test_the_make_targets_exist():
    makefile = (Path(__file__).resolve().parents[1] / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE)
