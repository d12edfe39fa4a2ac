"""The benchmark of memory: its fit, and one point of it."""

import importlib.util
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "benchmarks" / "memory.py"


@pytest.fixture(scope="module")
def memory():
    spec = importlib.util.spec_from_file_location("memory_benchmark", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_power_law_has_its_exponent_and_no_residual(memory):
    slope, residual = memory.exponent([(x, 3 * x**1.5) for x in (10, 20, 40, 80)])
    assert slope == pytest.approx(1.5)
    assert residual == pytest.approx(0.0, abs=1e-9)
    assert memory.exponent([(10, 10), (20, 20), (40, 40), (80, 160)])[1] > 0.1


def test_the_floor_is_subtracted_and_points_below_it_are_left_out(memory):
    floor = 50_000_000
    rows = [
        {"method": "m", "axis": "classes", "value": c, "bytes": floor + 20_000 * c, "whole": 1, "parameters": 1, "refused": ""}
        for c in (1000, 4000, 8000, 16_000)
    ]
    fit = memory.describe_axis("m", "classes", rows, floor)
    assert fit["fitted"] == 3
    assert fit["exponent"] == pytest.approx(1.0)
    assert memory.describe_axis("m", "classes", rows[:3], floor)["exponent"] is None


def test_a_point_counts_what_its_method_holds(memory):
    small, large = (memory._in_process("posterior", {"classes": classes, "batch": 4, "width": 64}, 0) for classes in (10, 20_000))
    assert small["refused"] == large["refused"] == ""
    assert large["bytes"] > small["bytes"] + 64 * 20_000 * 8  # the logits of 64 auxiliary samples in double precision
    assert large["whole"] < 4e9
