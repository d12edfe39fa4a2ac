import dataclasses
import re
from html.parser import HTMLParser

import pytest

from dosimeter import artefacts
from dosimeter.records import write_record
from dosimeter.report import page, render, write_report

HOSTILE = "</style></script><script src=https://example.org/x.js>alert(1)</script><img src=x onerror=alert(1)>\"'{{ 7 * 7 }}"


class Page(HTMLParser):
    """The page as a browser would take it apart: elements with their attributes, cells, headings, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data):
        if "style" in self._open:
            return
        self.text += data
        if self.rows and ("td" in self._open or "th" in self._open):
            self.rows[-1][-1] += data

    def row(self, start: str) -> list[str]:
        rows = [[" ".join(cell.split()) for cell in row] for row in self.rows]
        return next(row for row in rows if row and row[0].startswith(start))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def text(audit_records):
    return render(audit_records)


def test_the_numbers_are_on_the_page_beside_their_nulls(single_setting):
    parsed = Page(render(single_setting))
    assert parsed.row("Measure")[:4] == ["Measure", "Median", "Middle half", "95 % interval"]
    assert parsed.row("feature error")[1:4] == ["2.8×10⁻⁵", "9.3×10⁻⁶ – 8.0×10⁻⁵", "6.0×10⁻⁶ – 9.0×10⁻⁵"]
    ilrg = parsed.row("ilrg leaked")
    assert ilrg[1] == "100 %guessing 27.1 %"
    assert parsed.row("Accuracy")[1] == "91.3 % of 126 held-out images"


def test_every_record_is_there_with_verdict_reason_outcome_and_config(audit_records, text):
    parsed = Page(text)
    flat = " ".join(parsed.text.split())
    for record in audit_records:
        assert record.reason in flat
        assert record.verdict in flat
        assert f"{record.surface}, seed {record.seed} {record.key}" in flat
    assert len([details for details in parsed.all("details") if not details.get("class")]) == len(audit_records)
    assert '"steps": 2000' in flat
    assert "torch 2.13.0" in flat
    assert "dosimeter report ." in flat


def test_every_picture_is_inline_with_words_beside(audit_records, text):
    images = Page(text).all("img")
    below = sum(2 + len(shown["nulls"]) for record in audit_records for shown in record.evidence)
    assert len(images) == below + 2 * 4  # and four pairs at the top
    assert all((image["src"] or "").startswith("data:image/png;base64,iVBOR") and image["alt"] for image in images)


def test_the_page_loads_nothing(text):
    parsed = Page(text)
    assert not {"script", "link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in parsed.elements}
    for _, attributes in parsed.elements:
        for name in ("src", "srcset", "href", "xlink:href", "action", "poster", "data"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
        assert not any(name.startswith("on") for name in attributes)
    assert not re.search(r"@import|url\(|@font-face", text)
    assert parsed.all("meta")[1]["content"] == "default-src 'none'; img-src data:; style-src 'unsafe-inline'"
    assert len(text.encode()) < 2_000_000


def test_links_lead_to_places_on_the_page_and_ids_are_unique(text):
    parsed = Page(text)
    ids = [attributes["id"] for _, attributes in parsed.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {(link["href"] or "")[1:] for link in parsed.all("a")} <= set(ids)
    assert {attributes["aria-labelledby"] for _, attributes in parsed.elements if "aria-labelledby" in attributes} <= set(ids)


def test_every_drawing_says_what_it_shows_or_is_hidden(text):
    drawings = [attributes for attributes in Page(text).all("svg") if "x" not in attributes]
    assert drawings
    assert all(attributes.get("aria-label") or attributes.get("aria-hidden") for attributes in drawings)


def test_hostile_strings_stay_text(make_record):
    record = make_record("inputs", HOSTILE, metrics={HOSTILE: [1.0], "psnr": [9.0]}, nulls={HOSTILE: {HOSTILE: [1.0], "psnr": [2.0]}})
    record = dataclasses.replace(
        record,
        key=HOSTILE,
        config={HOSTILE: HOSTILE},
        threat_model={
            HOSTILE: HOSTILE,
            "model": HOSTILE,
            "labels": HOSTILE,
            "defenses": [{"name": HOSTILE, HOSTILE: HOSTILE}],
            "needs": [HOSTILE],
        },
        outcome=HOSTILE,
        reason=HOSTILE,
        warnings=[HOSTILE],
        versions={HOSTILE: HOSTILE},
        details={"message": HOSTILE, "identifiability": [HOSTILE], "unavailable": {HOSTILE: HOSTILE}, "batch_size": HOSTILE},
        evidence=[
            {"kind": "image", "private": HOSTILE, "recovered": HOSTILE, "nulls": {HOSTILE: HOSTILE}, "score": 9.0},
            {"kind": "text", "private": HOSTILE, "recovered": HOSTILE, "caption": HOSTILE},
            {"kind": "table", "private": {HOSTILE: HOSTILE}, "recovered": {HOSTILE: HOSTILE}},
            {"kind": HOSTILE, "private": HOSTILE, "recovered": HOSTILE},
        ],
    )
    parsed = Page(render([record], title=HOSTILE))
    assert not {"script", "img"} & {tag for tag, _ in parsed.elements}
    assert not any(name.startswith("on") for _, attributes in parsed.elements for name in attributes)
    assert parsed.text.count(HOSTILE) >= 12
    assert len(parsed.all("style")) == 1


def test_sparse_records_make_a_page(make_record):
    record = make_record("inputs", "dlg", metrics={"psnr": [None, None]}, nulls={}, outcome="diverged")
    bare = dataclasses.replace(record, threat_model={}, versions={}, config={})
    parsed = Page(render([bare]))
    assert parsed.row("PSNR")[1] == "miss"
    assert "diverged: left the finite numbers" in parsed.text


def test_the_same_records_make_the_same_page(audit_records, text):
    assert render(audit_records) == text


def test_no_records_are_refused():
    with pytest.raises(ValueError, match="expected at least one record"):
        render([])


@pytest.mark.parametrize(
    ("field", "said"), [("surface", "expected one of labels, targets, features, maps, inputs"), ("verdict", "expected one of leaked, ")]
)
def test_strange_records_are_refused(make_record, field, said):
    with pytest.raises(ValueError, match=f"{field}: {said}"):
        render([dataclasses.replace(make_record("labels", "ilrg"), **{field: "safe"})])


def test_write_report_rebuilds_the_page_from_the_folder(tmp_path, audit_records, text):
    for record in audit_records:
        write_record(tmp_path, record)
    path = write_report(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_text(encoding="utf-8") == text
    assert sorted(file.name for file in tmp_path.iterdir()) == ["records.jsonl", "report.html"]


def test_a_report_that_fails_leaves_the_old_page(tmp_path, make_record, monkeypatch):
    write_record(tmp_path, make_record("labels", "ilrg"))
    before = write_report(tmp_path).read_text(encoding="utf-8")
    monkeypatch.setattr(page, "render", lambda records: "half a page")
    monkeypatch.setattr(artefacts.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_report(tmp_path)
    assert (tmp_path / "report.html").read_text(encoding="utf-8") == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["records.jsonl", "report.html"]


def test_a_folder_without_records_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no records there"):
        write_report(tmp_path)
