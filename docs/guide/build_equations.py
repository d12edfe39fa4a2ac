# ruff: noqa: T201
"""Write docs/guide/equations.md, paper by paper which equation is computed where, from the docstrings and comments of the code.

    python docs/guide/build_equations.py            # write the page
    python docs/guide/build_equations.py --check    # fail where the page is not what the code says

A citation such as "Eq. (4)" belongs to the paper named last before it in the same docstring; without one, to the paper that the
module names first. A number with a dot, such as Eq. (5.12), is the thesis's.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = HERE / "equations.md"
FOLDERS = ("labels", "features", "attacks", "defenses", "surfaces", "metrics", "engines", "network", "client")
KINDS = ("labels", "features", "maps", "attacks", "defenses")

# The five papers: the key that `dosimeter reproduce` uses, the title, and the words by which docstrings name them.
PAPERS: dict[str, tuple[str, str]] = {
    "rgla": ("RGLA: Reverse Gradient Leakage Attack using Inverted Cross-Entropy Loss Function", r"RGLA|rgla"),
    "ilrg": ("Instance-wise Batch Label Restoration via Gradients in Federated Learning (iLRG), ICLR 2023", r"iLRG|ilrg|Ma et al\."),
    "soft-labels": (
        "Towards Eliminating Hard Label Constraints in Gradient Inversion Attacks, ICLR 2024",
        r"Hard Label Constraints|[Ss]oft-labels|Wang, Liang and He",
    ),
    "hfginv": ("High-Fidelity Gradient Inversion in Distributed Learning (HFGInv), AAAI 2024", r"HFGInv|hfginv|Ye et al\."),
    "thesis": ("Unveiling the Shadows: Investigating Privacy Risks of Gradient Leakage in Federated Learning (thesis)", r"[Tt]hesis"),
}
OTHER = r"(?P<other>[A-Z][\w-]+(?:(?:, [A-Z][\w-]+)*,? (?:&|and) [A-Z][\w-]+| et al\.))"
SOURCE = re.compile("|".join(f"(?P<paper{i}>{words})" for i, (_, words) in enumerate(PAPERS.values())) + "|" + OTHER)

NUMBER = r"\(?\d+(?:\.\d+)?\)?"
KIND = r"(?P<kind>Eqs?\.|Propositions?|Theorems?|Lemmas?|Algorithms?)"
REFERENCE = re.compile(rf"{KIND} (?P<numbers>{NUMBER}(?:(?:-|–|, | and ){NUMBER})*)(?![\w%])")
SINGULAR = {"Eqs.": "Eq.", "Propositions": "Proposition", "Theorems": "Theorem", "Lemmas": "Lemma", "Algorithms": "Algorithm"}
ORDER = ("Eq.", "Proposition", "Theorem", "Lemma", "Algorithm")


@dataclass(frozen=True)
class Citation:
    """One equation, in one paper, cited at one place of the code."""

    paper: str  # a key of PAPERS, or the authors
    kind: str
    number: tuple[int, ...]
    file: str
    symbol: str

    @property
    def equation(self) -> str:
        written = ".".join(map(str, self.number))
        return f"Eq. ({written})" if self.kind == "Eq." else f"{self.kind} {written}"


def citations(root: Path = ROOT) -> list[Citation]:
    """Every citation in the docstrings and comments of the package, each once."""
    files = [file for folder in FOLDERS for file in sorted((root / "dosimeter" / folder).rglob("*.py"))]
    found = [citation for file in files for citation in _of_file(file, file.relative_to(root).as_posix())]
    return list(dict.fromkeys(found))


def _of_file(file: Path, name: str) -> Iterator[Citation]:
    text = file.read_text(encoding="utf-8")
    passages = list(_passages(text))
    home = next((source for _, passage in passages if (source := _first_source(passage))), None)
    for symbol, passage in passages:
        for reference in REFERENCE.finditer(passage):
            for number in _numbers(reference["numbers"]):
                kind = SINGULAR.get(reference["kind"], reference["kind"])
                paper = _paper_before(passage[: reference.start()], kind, number) or home
                if paper:
                    yield Citation(paper, kind, number, name, symbol)


def _passages(text: str) -> Iterator[tuple[str, str]]:
    """Docstrings and comments with the class or function that they stand in; "" is the module."""
    tree = ast.parse(text)
    places = [("", tree, 1, len(text.splitlines()) + 1)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            places.append((node.name, node, node.lineno, node.end_lineno or node.lineno))
    for symbol, node, _, _ in places:
        if docstring := ast.get_docstring(node):
            yield symbol, re.sub(r"\s+", " ", docstring)
    for position, line in enumerate(text.splitlines(), 1):
        _, mark, comment = line.partition("# ")
        if mark and REFERENCE.search(comment):
            inside = [place for place in places if place[2] <= position <= place[3]]
            yield min(inside, key=lambda place: place[3] - place[2])[0], comment


def _sources(passage: str) -> list[tuple[int, str]]:
    """Where papers are named, in order; names inside a quoted title are its words, unless the title is one of the five."""
    named = []
    for found in SOURCE.finditer(passage):
        paper = next((key for i, key in enumerate(PAPERS) if found[f"paper{i}"]), found["other"])
        if paper in PAPERS or passage[: found.start()].count('"') % 2 == 0:
            named.append((found.start(), paper))
    return named


def _first_source(passage: str) -> str | None:
    return next((paper for _, paper in _sources(passage)), None)


def _paper_before(passage: str, kind: str, number: tuple[int, ...]) -> str | None:
    """The paper named last; behind "Departures" the method's own, the one named first, unless another is named there."""
    if kind == "Eq." and len(number) > 1:
        return "thesis"
    named, departures = _sources(passage), passage.find("Departure")
    if not named:
        return None
    position, paper = named[-1]
    return named[0][1] if position < departures else paper


def _numbers(text: str) -> list[tuple[int, ...]]:
    """ "(1)-(3), (5.9)" as single numbers."""
    numbers: list[tuple[int, ...]] = []
    for part in re.split(r", | and ", text):
        ends = [tuple(int(digit) for digit in end.strip("()").split(".")) for end in re.split(r"[-–]", part)]
        first, last = ends[0], ends[-1]
        numbers += [(*first[:-1], value) for value in range(first[-1], last[-1] + 1)]
    return numbers


def methods() -> list[tuple[str, str, str, str]]:
    """Kind, name, file and source of every registered method."""
    from dosimeter.listing import registries

    rows = []
    for kind in KINDS:
        for name in registries()[kind]:
            entry = registries()[kind].entry(name)
            file = f"{entry.__module__.replace('.', '/')}.py"
            rows.append((kind, name, file, _source(inspect.getdoc(entry) or "")))
    return rows


def _source(docstring: str) -> str:
    """The first sentence behind the idea: the paper, and where in it."""
    body = re.sub(r"\s+", " ", docstring.partition("\n")[2]).strip()
    sentence = re.split(r"(?<!al)(?<!Eq)(?<!Eqs)\. (?=[A-Z`∇])", body.partition("Departure")[0])[0]
    cited = re.match(r"(?:\"[^\"]*\"|[^\":])*(?:\d{4}|thesis)(?:\"[^\"]*\"|[^\":])*(?=: [a-zλ∇‖])", sentence)
    return (cited[0] if cited else sentence).strip().rstrip(".:;").replace("|", "\\|") or "ours"


def page() -> str:
    found = citations()
    parts = [
        "# Paper, equation, file",
        "<!-- written by docs/guide/build_equations.py from the docstrings; change those, and run `make docs` -->",
        "Which file computes which equation. The docstrings name the papers and their equations, and this page collects them. A class "
        "cites all equations of its method. A function cites the one that it computes. Steps of "
        "derivations that no code computes are left out.",
    ]
    for key, (title, _) in PAPERS.items():
        parts += [f"## {title}", f"`dosimeter reproduce` calls it `{key}`.", _table([c for c in found if c.paper == key])]
    parts += ["## Other papers", _other([c for c in found if c.paper not in PAPERS])]
    parts += ["## Every method", "A source is quoted from the method's docstring, which also names the departures."]
    rows = [f"| {kind} | `{name}` | {_link(file)} | {source} |" for kind, name, file, source in methods()]
    parts.append("\n".join(["| kind | method | file | source |", "|---|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


def _table(found: list[Citation]) -> str:
    cited = sorted({(ORDER.index(c.kind), c.number, c.equation) for c in found})
    rows = [f"| {equation} | {_places(found, equation)} |" for _, _, equation in cited]
    return "\n".join(["| equation | where |", "|---|---|", *rows])


def _other(found: list[Citation]) -> str:
    papers = sorted({c.paper for c in found})
    rows = []
    for paper in papers:
        of_paper = [c for c in found if c.paper == paper]
        cited = sorted({(ORDER.index(c.kind), c.number, c.equation) for c in of_paper})
        rows += [f"| {paper} | {equation} | {_places(of_paper, equation)} |" for _, _, equation in cited]
    return "\n".join(["| paper | equation | where |", "|---|---|---|", *rows])


def _places(found: list[Citation], equation: str) -> str:
    by_file: dict[str, list[str]] = {}
    for citation in found:
        if citation.equation == equation:
            by_file.setdefault(citation.file, []).append(citation.symbol)
    return "; ".join(_link(file) + _symbols(symbols) for file, symbols in by_file.items())


def _symbols(symbols: list[str]) -> str:
    named = list(dict.fromkeys(f"`{symbol}`" for symbol in symbols if symbol))
    return f" {', '.join(named)}" if named else ""


def _link(file: str) -> str:
    return f"[{file.removeprefix('dosimeter/')}](../../{file})"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the page is out of date")
    options = parser.parse_args(arguments)
    text = page()
    stale = not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text
    if stale and not options.check:
        PAGE.write_text(text, encoding="utf-8")
    if stale:
        print(f"{PAGE.name}: {'not what the docstrings say' if options.check else 'written'}")
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
