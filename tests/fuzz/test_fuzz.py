"""Files, command lines and calls that are damaged or made to do harm end in an answer or in a sentence."""

import importlib
import importlib.util
import sys
from pathlib import Path

import pytest

import dosimeter as dm

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "fuzz.py"


def fuzz():
    spec = importlib.util.spec_from_file_location("fuzz", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fuzz"] = module
    spec.loader.exec_module(module)
    return module


def test_some_damaged_files():
    result = fuzz().run("files", 330, seed=1)
    assert result["inputs"] == 330
    assert result["faults"] == []
    assert result["counts"]["answered"] >= 5  # some damage is harmless: the readers do read
    assert result["counts"]["refused"] >= 200


def test_some_damaged_captures():
    result = fuzz().run("captures", 300, seed=1)
    assert result["inputs"] == 300
    assert result["faults"] == []
    assert result["counts"]["answered"] >= 5
    assert result["counts"]["refused"] >= 200


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("files", 10_000), ("captures", 10_000), ("commands", 500), ("calls", 500)])
def test_thousands_of_inputs(kind, count):
    result = fuzz().run(kind, count, seed=0, jobs=2)
    assert result["inputs"] == count
    assert result["faults"] == []
    assert result["counts"]["answered"] >= count // 50
    if kind == "calls":  # each of them does run, and is not only refused
        assert set(result["answered"]) == {name for name, _ in importlib.import_module("fuzz_calls").CALLS}


def test_the_fuzzer_sees_faults(tmp_path):
    """An input that starts a program, one that writes elsewhere, one that hangs, one that fills memory and one that crashes."""
    import os
    import time

    module = fuzz()
    watch = module.Watch()
    module.SECONDS, module.LOADED, module.BYTES = 1, 2, 10**7
    for number in (module.signal.SIGALRM, module.signal.SIGPROF):
        module.signal.signal(number, module._raise_hang)
    outside = tmp_path / "outside"
    deeds = {
        "deed": [lambda: os.system("true"), lambda: outside.write_text("x")],
        "hang": [lambda: time.sleep(10), lambda: [number for number in iter(int, 1) if number]],
        "memory": [lambda: bytes(10**8) and bytearray(range(256)) * 10**6],
        "traceback": [lambda: {}["x"], lambda: int("x"), lambda: len(3)],  # pyright: ignore[reportArgumentType]
        "refused": [lambda: dm.attack("nothing"), lambda: dm.read(tmp_path / "nothing")],
        "answered": [lambda: (tmp_path / "in" / "x").write_text("x")],
    }
    (tmp_path / "in").mkdir()
    for wanted, actions in deeds.items():
        for action in actions:
            assert module.attempt(action, watch, tmp_path / "in")[0] == wanted
