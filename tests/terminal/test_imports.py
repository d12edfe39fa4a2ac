"""A command imports what it uses."""

import subprocess
import sys

import pytest

PRINT_MODULES = """
import sys
from dosimeter.cli import main
assert main({words}) == 0
sys.stderr.write(" ".join(name for name in sys.modules if name.startswith("dosimeter.")))
"""


@pytest.mark.parametrize(
    ("words", "unused"),
    [
        (["run", "labels=ilrg", "data.name=digits"], ("dosimeter.report", "dosimeter.runs.reproduction", "dosimeter.runs.audit")),
        (["list", "losses"], ("dosimeter.report", "dosimeter.runs")),
    ],
)
def test_a_command_leaves_out_what_others_print_with(words, unused):
    done = subprocess.run([sys.executable, "-c", PRINT_MODULES.format(words=words)], capture_output=True, text=True, check=True)
    modules = done.stderr.split()
    assert "dosimeter.terminal" in modules
    assert [name for name in modules for package in unused if name == package or name.startswith(f"{package}.")] == []
