"""What the source distribution and the wheel hold, built from a copy of the tracked files."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def tracked():
    if not (ROOT / ".git").exists() or shutil.which("git") is None:
        pytest.skip("only a git checkout says which files belong to the source")
    listed = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")
    return {name for name in listed if name and (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def built(tracked, tmp_path_factory):
    """The folder of the source distribution, and of the wheel that was built from that distribution."""
    folder = tmp_path_factory.mktemp("packages")
    for name in tracked:
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, folder / "source" / name)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(folder / "source")]
    subprocess.run(command, capture_output=True, text=True, check=True)
    return folder


def test_the_source_distribution_holds_the_repository(built, tracked):
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        held = {member.name.partition("/")[2] for member in packed.getmembers() if member.isfile()}
    assert tracked - held == set()
    made = {name for name in held - tracked if not name.startswith("dosimeter.egg-info/")}
    assert made == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_holds_everything_that_runs(built, tracked):
    (wheel,) = built.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name for name in tracked if name.startswith("dosimeter/")}
    assert wanted - packed == set()
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in packed)
    tables = {name for name in tracked if name.startswith("papers/") and name.endswith(".toml")}
    shared = {name.partition(".data/data/share/dosimeter/")[2] for name in packed}
    assert tables
    assert tables - shared == set()


@pytest.mark.slow
def test_the_installed_wheel_audits_and_reproduces_outside_of_the_repository(built, tmp_path):
    """In an environment of its own; the dependencies are borrowed from this one by their path."""
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "venv")], check=True)
    (wheel,) = built.glob("*.whl")
    subprocess.run(
        [tmp_path / "venv" / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", str(wheel)], check=True
    )
    (packages,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (packages / "borrowed.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")) + "\n")

    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}

    def run(program, *words):
        command = [tmp_path / "venv" / "bin" / program, *words]
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True, check=True).stdout

    assert run("python", "-c", "import dosimeter; print(dosimeter.__file__)").startswith(str(packages))
    words = ["data.name=digits", "data.batch_size=2", 'labels=["ilrg"]', "features=[]", "attacks=[]"]
    assert "labels: leaked" in run("dosimeter", "audit", *words)
    assert (tmp_path / "dosimeter-audit" / "report.html").is_file()
    assert "ilrg/table1" in run("dosimeter", "reproduce")
