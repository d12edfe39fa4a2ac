"""Names are found in the file of their name first; a package is read whole only where all of its names are wanted."""

import subprocess
import sys

import pytest

from dosimeter.registry import ATTACKS, DEFENSES, LABELS, MODELS, SAMPLERS

SCRIPT = """
import sys
from dosimeter.registry import {registry}
{statement}
print(*sorted(name for name in sys.modules if name.startswith("dosimeter.{package}.")))
"""


def imported(registry: str, statement: str, package: str) -> list[str]:
    script = SCRIPT.format(registry=registry, statement=statement, package=package)
    return subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout.split()


@pytest.mark.parametrize("statement", ["LABELS.entry('idlg')", "assert 'idlg' in LABELS", "LABELS.build('idlg')"])
def test_one_name_imports_one_file(statement: str) -> None:
    assert imported("LABELS", statement, "labels") == ["dosimeter.labels.idlg"]


def test_all_names_import_the_package() -> None:
    assert "dosimeter.labels.ilrg" in imported("LABELS", "list(LABELS)", "labels")


def test_a_name_in_a_file_of_another_name_is_found() -> None:
    assert "lenet5" in MODELS
    assert "random" in SAMPLERS


@pytest.mark.parametrize("name", ["no_such_file", "not/a.name", "__init__", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    assert name not in ATTACKS
    with pytest.raises(ValueError, match="no attack named"):
        ATTACKS.entry(name)


def test_the_nearest_name_is_suggested() -> None:
    with pytest.raises(ValueError, match="did you mean 'posterior'"):
        LABELS.entry("posteriors")


def test_articles_fit_their_nouns():
    with pytest.raises(TypeError, match="expected the name of an attack or an Attack, got 3"):
        ATTACKS.resolve(3)
    with pytest.raises(TypeError, match="expected the name of a defense or a Defense, got 3"):
        DEFENSES.resolve(3)
