import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def test_the_wheel_holds_everything_that_runs(tmp_path):
    """Built from a copy of the tracked files; what the report needs beside Python must be inside."""
    tracked = subprocess.run(["git", "-C", str(ROOT), "ls-files", "-z"], capture_output=True, text=True, check=True).stdout.split("\0")
    source = tmp_path / "source"
    for name in filter(None, tracked):
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            (source / name).write_bytes((ROOT / name).read_bytes())
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path), str(source)]
    subprocess.run(command, capture_output=True, text=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    packed = set(zipfile.ZipFile(wheel).namelist())
    wanted = {name for name in tracked if name.startswith("dosimeter/")}
    assert wanted - packed == set()
    assert not any(name.startswith(("tests/", "benchmarks/")) for name in packed)
    tables = {name for name in tracked if name.startswith("papers/") and name.endswith(".toml")}
    shared = {name.partition(".data/data/share/dosimeter/")[2] for name in packed}
    assert tables
    assert tables - shared == set()
