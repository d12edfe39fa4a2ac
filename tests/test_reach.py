"""The table of models, losses and surfaces is what docs/guide/build_reach.py measures."""

import importlib.util
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_every_cell_of_the_table_is_what_a_run_gives():
    spec = importlib.util.spec_from_file_location("build_reach", ROOT / "docs/guide/build_reach.py")
    assert spec is not None
    assert spec.loader is not None
    build = importlib.util.module_from_spec(spec)
    sys.modules["build_reach"] = build  # dataclasses look their module up
    spec.loader.exec_module(build)
    assert build.PAGE.read_text(encoding="utf-8") == build.page()
