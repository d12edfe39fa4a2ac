"""The report on paper: one page, printed by the user's own Chromium or Chrome."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from dosimeter.artefacts import atomic_write, refuse_link

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
LONGEST_PRINT = 60  # seconds
PDF_MARK = b"%PDF-"


def print_report(page: Path) -> Path:
    """Print `report.html` to `report.pdf` beside it. Where no browser is found, a sentence says so, and the page is as good."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        raise ValueError(f"--pdf: needs Chromium or Chrome, and none is installed here; open {page} in a browser and print it")
    path = page.with_suffix(".pdf")
    refuse_link(path)
    if path.exists() and (not path.is_file() or not path.open("rb").read(len(PDF_MARK)) == PDF_MARK):
        raise ValueError(f"{path}: is no PDF and is not overwritten; move it or choose another folder")
    with tempfile.TemporaryDirectory() as profile, atomic_write(path) as unfinished:
        command = [browser, "--headless", "--disable-gpu", "--no-pdf-header-footer", f"--user-data-dir={profile}"]
        if os.geteuid() == 0:
            command.append("--no-sandbox")  # which Chromium asks of root; the page runs no script and loads nothing
        command += [f"--print-to-pdf={unfinished.absolute()}", page.absolute().as_uri()]
        try:
            subprocess.run(command, check=True, capture_output=True, timeout=LONGEST_PRINT)
        except (subprocess.SubprocessError, OSError) as error:
            raise ValueError(f"--pdf: {browser} did not print {page}: {type(error).__name__}") from None
        if not unfinished.read_bytes().startswith(PDF_MARK):
            raise ValueError(f"--pdf: {browser} wrote no PDF of {page}")
    return path
