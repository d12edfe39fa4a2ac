"""An audit that is killed, stopped or out of disk loses nothing, repeats nothing, and ends as if nothing had happened."""

import importlib
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")


@pytest.fixture(scope="module")
def kills():
    sys.path.insert(0, BENCHMARKS)  # the audits' processes import the module by its name
    yield importlib.import_module("kills")
    sys.path.remove(BENCHMARKS)


@pytest.fixture(scope="module")
def audits(kills, tmp_path_factory):
    return kills.Audits(tmp_path_factory.mktemp("audits"))


def test_kills_at_many_instants(kills, audits):
    found = kills.kill(audits, kills=50, seed=0)
    assert sum(found.counts.values()) == 50
    assert set(found.counts) == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert +found.faults == {}
    assert found.slowest < kills.PATIENCE
    assert found.resumed > 0


@pytest.mark.parametrize("largest_file", [0, 1, 2000, 3000, 20_000, 100_000])
def test_a_full_disk(kills, audits, largest_file):
    found = kills.fill_disk(audits, largest_file)
    assert found.audits == 1
    assert +found.faults == {}
