"""The guide's examples are run as they stand: Python, TOML files and commands, page by page.

A block is `python`, `toml` (written to the file that the line above names) or `sh`. Commands that need data or hours are `console`
blocks: they are only read as the command line reads them.
"""

import re
import shlex
from pathlib import Path

import pytest

from dosimeter.cli import main
from dosimeter.registry import METHODS

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted((ROOT / "docs/guide").glob("*.md"))
BLOCK = re.compile(r"(?:^`(?P<file>[\w.-]+)`:\n\n)?^```(?P<language>\w+)\n(?P<text>.*?)^```$", re.DOTALL | re.MULTILINE)


def blocks(page: Path) -> list[tuple[str, str, str]]:
    return [(found["language"], found["file"] or "", found["text"]) for found in BLOCK.finditer(page.read_text(encoding="utf-8"))]


def commands(text: str) -> list[list[str]]:
    lines = text.replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith("dosimeter ")]


@pytest.fixture
def registries():
    """What an example registers is taken out again."""
    known = {registry: {name: registry.entry(name) for name in registry} for registry in METHODS}
    yield
    for registry, entries in known.items():
        registry._entries = entries


@pytest.mark.usefixtures("registries")
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_examples_of_a_page_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    names: dict = {"__name__": f"guide_{page.stem}"}
    for position, (language, file, text) in enumerate(blocks(page)):
        if language == "python":
            exec(compile(text, f"{page.name}, block {position}", "exec"), names)
        elif language == "toml":
            assert file, f"{page.name}: say above block {position} which file it is"
            Path(file).write_text(text, encoding="utf-8")
        elif language == "sh":
            for command in commands(text):
                assert main(command) == 0, command


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_that_are_not_run_are_commands(page):
    from dosimeter.cli import _parser

    for language, _, text in blocks(page):
        if language == "console":
            for command in commands(text):
                assert _parser().parse_args(command)  # an unknown command or option ends the test


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_uses_no_other_blocks(page):
    assert {language for language, _, _ in blocks(page)} <= {"python", "toml", "sh", "console", "text"}
