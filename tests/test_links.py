"""Every relative link, and every file that the pages name, exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").rglob("*.md"))
GUIDE = [page for page in PAGES if page.parent.name != "results"]  # results name commands as they were run
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(#[^)\s]*)?\)")
NAMED = re.compile(r"(?<![\w/.-])((?:dosimeter|papers|benchmarks|tests|docs)/[\w/-]+(?:\.\w+)*)")
BLOCK = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def text_of(page: Path) -> str:
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {"#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for link, anchor in LINK.findall(text_of(page)):
        target = (page.parent / link).resolve() if link else page
        assert target.exists(), f"{page.name}: {link}"
        if anchor:
            assert anchor in anchors(target), f"{page.name}: {link}{anchor}"


@pytest.mark.parametrize("page", GUIDE, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_files_that_a_page_names_exist(page):
    missing = {name for name in NAMED.findall(text_of(page)) if not (ROOT / name).exists()}
    assert not missing


def test_every_page_can_be_reached():
    linked = {(page.parent / link).resolve() for page in PAGES for link, _ in LINK.findall(text_of(page)) if link}
    alone = {page for page in PAGES if page.is_relative_to(ROOT / "docs") and page.name != "index.md"} - linked
    assert not alone


def test_the_architecture_names_every_room():
    rooms = {file.parent.name for file in (ROOT / "dosimeter").glob("*/__init__.py")}
    page = (ROOT / "docs/guide/architecture.md").read_text(encoding="utf-8")
    assert {room for room in rooms if f"`dosimeter/{room}/`" not in page} == set()


@pytest.mark.parametrize("folder", ["dosimeter", "benchmarks", "papers"])
def test_the_code_names_no_file_that_is_gone(folder):
    for file in sorted((ROOT / folder).rglob("*.py")):
        named = re.findall(r"(?<![\w/.-])(?:docs|dosimeter)/[\w/-]+(?:\.(?:md|py))?", file.read_text(encoding="utf-8"))
        missing = {name for name in named if not (ROOT / name).exists()}
        assert not missing, file.relative_to(ROOT)
