"""The page in a real browser, at the widths of a phone and of a desk, by day and by night."""

import shutil

import pytest

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
        assert page.locator("details.evidence").first.get_attribute("open") is not None
        closed = page.locator("details:not([open])").last
        closed.locator("summary").press("Enter")
        assert page.locator("details").last.get_attribute("open") is not None
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
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(OVERFLOW) == []
        assert page.locator(".nulls").first.locator(".null-name").count() == 8


@pytest.mark.browser
@pytest.mark.parametrize("width", [360, 1280])
def test_long_words_do_not_widen_the_page(browser, make_record, width):
    name = "a" * 300
    record = make_record("inputs", name, metrics={"psnr": [9.0, 8.0], name: [1.0, 2.0]}, nulls={name: {"psnr": [1.0, 2.0]}}, reason=name)
    record.threat_model["model"] = name
    with browser.new_context(viewport={"width": width, "height": 800}) as context:
        page = context.new_page()
        page.set_content(render([record]))
        assert page.evaluate("document.documentElement.scrollWidth") == width
