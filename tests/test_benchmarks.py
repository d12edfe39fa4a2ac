"""The index of the benchmarks is whole."""

import re
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "benchmarks"


def test_every_script_is_in_the_index():
    listed = re.findall(r"^\| `(\w+\.py)` \|", (FOLDER / "README.md").read_text(encoding="utf-8"), re.M)
    assert listed == sorted(file.name for file in FOLDER.glob("*.py"))
