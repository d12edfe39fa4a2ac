"""The page in a real browser, at the widths of a phone and of a desk, by day and by night."""

import re
import shutil
from dataclasses import replace

import pytest

from dosimeter.cli import main
from dosimeter.records import write_record
from dosimeter.report import render

ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
# For each text element: its colour against the first opaque background behind it, as WCAG 2 counts contrast.
CONTRAST = """() => {
  const channels = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = ([r, g, b]) => [r, g, b].map(v => v / 255).map(v => v <= .03928 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = element => { for (let e = element; e; e = e.parentElement) { const c = channels(getComputedStyle(e).backgroundColor);
    if (c.length === 3 || c[3] > 0) return c; } return [255, 255, 255]; };
  return [...document.querySelectorAll('body *')].filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim())).map(e => {
    const [a, b] = [luminance(channels(getComputedStyle(e).color)), luminance(behind(e))];
    return [(Math.max(a, b) + .05) / (Math.min(a, b) + .05), e.className, e.textContent.slice(0, 30)];
  }).sort((x, y) => x[0] - y[0])[0]; }"""
# Elements that reach past the window; what is meant for screen readers alone is clipped and does not count.
OVERFLOW = """() => [...document.querySelectorAll('body *')].filter(e => !e.closest('.hidden, .quiet, thead'))
  .filter(e => { const r = e.getBoundingClientRect(); return r.width > 1 && (r.right > innerWidth + 1 || r.left < -1); })
  .map(e => e.tagName + '.' + (e.className.baseVal ?? e.className))"""

HEIGHTS = "all => all.map(element => element.clientHeight)"


@pytest.fixture(scope="module")
def browser():
    executable = shutil.which("chromium") or shutil.which("google-chrome")
    if executable is None:
        pytest.skip("neither chromium nor google-chrome is installed")
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as driver:
        launched = driver.chromium.launch(executable_path=executable, args=ARGUMENTS)
        yield launched
        launched.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_the_page_fits_reads_well_and_asks_for_nothing(browser, audit_records, tmp_path, width, scheme):
    path = tmp_path / "report.html"
    path.write_text(render(audit_records), encoding="utf-8")
    said, asked = [], []
    with browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme) as context:
        page = context.new_page()
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []
        contrast, *where = page.evaluate(CONTRAST)
        assert contrast >= 4.5, where
        assert page.evaluate("[...document.images].every(image => image.complete && image.naturalWidth === 32)")
        background = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert background == {"light": "rgb(252, 251, 249)", "dark": "rgb(22, 22, 21)"}[scheme]
        top = page.evaluate("document.images[0].getBoundingClientRect().bottom")
        assert top < 600  # the worst leaked picture is on the first screen, whole
        assert page.locator("details.fold[open]").count() == 0
        page.locator('a[href="#inputs"]').click()
        assert page.locator("details.fold[open]").count() == 1  # a link opens what it leads to
        assert page.locator("details.evidence").first.get_attribute("open") is not None
        last = page.locator("details.fold").last
        last.locator("summary").first.press("Enter")
        assert last.get_attribute("open") is not None
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []
        contrast, *where = page.evaluate(CONTRAST)
        assert contrast >= 4.5, where
    assert said == []
    assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 760, 1024, 1280])
def test_many_nulls_do_not_widen_the_page(browser, make_record, width):
    nulls = {name: {"psnr": [11.25, 12.5], "mse": [0.0178, 0.0395]} for name in (f"decoder, features of kind {k}" for k in range(8))}
    record = make_record("inputs", "rgla", metrics={"psnr": [20.3, 22.0], "mse": [0.0093, 0.0109]}, nulls=nulls)
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record]))
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []
        assert page.locator(".nulls").first.locator(".null-name").count() == 8


@pytest.mark.browser
def test_values_with_several_nulls_fit_a_phone(browser, make_record):
    nulls = {name: {"token_f1": [0.118], "token_precision": [0.122]} for name in ("common words", "foreign")}
    record = make_record("tokens", "embedding_rows", metrics={"token_f1": [1.0], "token_precision": [1.0]}, nulls=nulls)
    with browser.new_context(viewport={"width": 360, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record]))
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == 360
        assert page.evaluate(OVERFLOW) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 768, 1024])
def test_measures_with_long_names_fit_a_tablet(browser, make_record, width):
    scores = {"members_at_1": [0.0], "members_at_10": [0.75], "members_at_0_1": [0.0], "membership_auc": [0.9204]}
    record = make_record("membership", "alignment", metrics=scores, nulls={"guessing": scores, "foreign": scores})
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record]))
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_rows_of_a_table_keep_their_words_whole(browser, make_record, width):
    values = {"age": "47.59 years", "hours a week": "63.35 h", "education": "secondary"}
    rows = [{"kind": "table", "private": values, "recovered": values, "nulls": {"nearest": values}, "sample": i} for i in range(4)]
    record = make_record("inputs", "dlg", metrics={"columns_right": [1.0] * 4}, verdict="leaked", reason="", evidence=rows)
    curve = make_record("membership", "alignment", metrics={"members_at_1": [0.5]}, details={"curve": {"found": [[0, 0], [1, 1]]}})
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record, curve]))
        assert page.locator(".finding.first .values:visible").count() == (3 if width > 1000 else 2)
        names = page.locator(".finding .values tbody th:text-is('education'):visible")
        assert max(names.evaluate_all(HEIGHTS)) < 36  # one line high
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []
        page.emulate_media(media="print")
        assert max(names.evaluate_all(HEIGHTS)) < 36


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_long_words_do_not_widen_the_page(browser, make_record, width):
    name = "a" * 300
    record = make_record("inputs", name, metrics={"psnr": [9.0, 8.0], name: [1.0, 2.0]}, nulls={name: {"psnr": [1.0, 2.0]}}, reason=name)
    record.threat_model["model"] = name
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record]))
        page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
        assert page.evaluate("document.documentElement.scrollWidth") == width


UNTRIED = (("maps", "shifts"), ("membership", "spans"))


@pytest.mark.browser
def test_the_report_prints_on_one_page(browser, single_setting, make_record, tmp_path):
    path = tmp_path / "report.html"
    untried = [make_record(surface, method, reason="no layer has room for it. " * 20) for surface, method in UNTRIED]
    premises = {
        "premises": ["the update is one gradient of the declared loss at the weights that were sent", "no defense changed the update"]
    }
    proved = [replace(one, details=one.details | premises) if one.surface in ("labels", "features") else one for one in single_setting]
    path.write_text(render([*proved, *untried]), encoding="utf-8")
    with browser.new_context(color_scheme="dark") as context:
        page = context.new_page()
        page.goto(path.as_uri())
        pages = page.pdf(prefer_css_page_size=True)
        assert len(re.findall(rb"/Type */Page\b", pages)) == 1
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        assert page.locator(".plain p").is_visible()
        assert not page.locator(".below").is_visible()


@pytest.mark.browser
def test_the_command_prints_a_pdf(browser, audit_records, tmp_path, capsys):
    for record in audit_records:
        write_record(tmp_path, record)
    assert main(["report", str(tmp_path), "--pdf"]) == 0
    assert capsys.readouterr().out.split() == [str(tmp_path / "report.html"), str(tmp_path / "report.pdf")]
    assert (tmp_path / "report.pdf").read_bytes().startswith(b"%PDF-")


def test_without_a_browser_the_command_says_so_and_the_page_is_there(audit_records, tmp_path, capsys, monkeypatch):
    for record in audit_records:
        write_record(tmp_path, record)
    monkeypatch.setattr("shutil.which", lambda name: None)
    assert main(["report", str(tmp_path), "--pdf"]) == 2
    assert "needs Chromium or Chrome" in capsys.readouterr().err
    assert (tmp_path / "report.html").exists()
