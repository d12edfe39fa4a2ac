"""The page "paper, equation, file" is what docs/guide/build_equations.py reads off the docstrings."""

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SPEC = importlib.util.spec_from_file_location("build_equations", ROOT / "docs/guide/build_equations.py")
assert SPEC is not None
assert SPEC.loader is not None
build = importlib.util.module_from_spec(SPEC)
sys.modules["build_equations"] = build  # dataclasses look their module up
SPEC.loader.exec_module(build)

COMPUTED = {  # equations of each paper that the code must name
    "rgla": [(1,), *((i,) for i in range(3, 8))],
    "ilrg": [(i,) for i in range(1, 8)],
    "soft-labels": [(i,) for i in range(2, 9)],
    "hfginv": [(i,) for i in range(3, 13)],
    "thesis": [
        (3, 12),
        (3, 19),
        *((4, i) for i in range(13, 22)),
        *((5, i) for i in range(9, 13)),
        (5, 14),
        *((5, i) for i in range(16, 25)),
    ],
}


def cited(tmp_path: Path, text: str) -> set[tuple[str, str]]:
    (tmp_path / "dosimeter/labels").mkdir(parents=True)
    (tmp_path / "dosimeter/labels/one.py").write_text(text)
    return {(citation.paper, citation.equation) for citation in build.citations(tmp_path)}


def test_the_page_is_what_the_docstrings_say():
    assert build.PAGE.read_text(encoding="utf-8") == build.page(), "run `make docs`"


@pytest.mark.parametrize("paper", COMPUTED)
def test_every_paper_has_its_equations(paper):
    found = {citation.number for citation in build.citations() if citation.paper == paper and citation.kind == "Eq."}
    assert found >= set(COMPUTED[paper])


def test_every_method_has_a_file_and_a_source():
    for kind, name, file, source in build.methods():
        assert (ROOT / file).is_file(), (kind, name)
        assert source, (kind, name)


def test_ranges_and_lists_are_single_equations(tmp_path):
    text = '"""Ma et al., ICLR 2023: Eqs. (1)-(3), (7) and Algorithm 1."""'
    assert cited(tmp_path, text) == {("ilrg", f"Eq. ({i})") for i in (1, 2, 3, 7)} | {("ilrg", "Algorithm 1")}


def test_an_equation_belongs_to_the_paper_named_last(tmp_path):
    text = '"""Yin et al., "Seen by Ours and Others", Eq. (7); rgla Eq. (5). Departures: none of Eq. (7)."""'
    assert cited(tmp_path, text) == {("Yin et al.", "Eq. (7)"), ("rgla", "Eq. (5)")}


def test_a_comment_belongs_to_the_paper_of_its_module(tmp_path):
    text = '"""HFGInv, Stage I."""\n\n\ndef cosine():\n    return 1  # Eq. (6)\n'
    assert cited(tmp_path, text) == {("hfginv", "Eq. (6)")}


def test_a_number_with_a_dot_is_of_the_thesis(tmp_path):
    assert cited(tmp_path, '"""rgla; see Eq. (5.12)."""') == {("thesis", "Eq. (5.12)")}
