"""The tap in NVIDIA FLARE. A real simulation is among the slow tests."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import dosimeter as dm
from dosimeter.captures.store import captures_in, read_model

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'dosimeter[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import FilterChainType, FilterContextKey
from nvflare.apis.fl_constant import ReservedKey
from nvflare.apis.fl_context import FLContext

from dosimeter.integrations.nvflare import CaptureFilter

TRAINING = {"name": "fedavg", "learning_rate": 0.1}


def _context() -> FLContext:
    context = FLContext()
    context.set_prop(ReservedKey.PROCESS_TYPE, "CJ", private=True, sticky=False)
    context.set_prop(ReservedKey.IDENTITY_NAME, "site-1", private=True, sticky=False)
    return context


def _filter(folder, chain, **options) -> CaptureFilter:
    tap = CaptureFilter(str(folder), **options)
    tap.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    return tap


@pytest.mark.parametrize(("data_kind", "kind"), [(DataKind.WEIGHTS, "weights"), (DataKind.WEIGHT_DIFF, "difference")])
def test_what_passes_is_written_and_unchanged(tmp_path, data_kind, kind):
    context, before, after = _context(), {"w": np.ones((2, 3), np.float32)}, {"w": np.full((2, 3), 2.0, np.float32)}
    _filter(tmp_path, FilterChainType.TASK_DATA_CHAIN).process(DXO(DataKind.WEIGHTS, before).to_shareable(), context)
    tap = _filter(tmp_path, FilterChainType.TASK_RESULT_CHAIN, training=TRAINING, facts={"input_shape": [3]})
    shareable = DXO(data_kind, after).to_shareable()
    shareable.set_header("current_round", 5)
    passed = tap.process(shareable, context)
    assert np.array_equal(passed["DXO"]["data"]["w"] if "DXO" in passed else after["w"], after["w"])
    (path,) = captures_in(tmp_path)
    capture = dm.read_capture(path)
    assert (capture.kind, capture.round, capture.client, capture.input_shape) == (kind, 5, "site-1", (3,))
    assert capture.training == dm.FedAvg(learning_rate=0.1)
    assert np.array_equal(capture.update["w"].numpy(), after["w"])
    assert np.array_equal(read_model(path, capture)["w"].numpy(), before["w"])


def test_each_client_has_a_folder_of_its_own(tmp_path):
    _filter(tmp_path / "{client}", FilterChainType.TASK_RESULT_CHAIN).process(
        DXO(DataKind.WEIGHTS, {"w": np.ones(3)}).to_shareable(), _context()
    )
    assert len(captures_in(tmp_path / "site-1")) == 1


def test_a_tap_that_cannot_write_lets_the_round_go_on(tmp_path, caplog):
    (tmp_path / "file").write_text("in the way")
    tap = _filter(tmp_path / "file", FilterChainType.TASK_RESULT_CHAIN)
    assert tap.process(DXO(DataKind.WEIGHTS, {"w": np.ones(3)}).to_shareable(), _context()) is not None
    assert "was not captured" in caplog.text


@pytest.mark.slow
def test_the_example_runs_a_real_simulation(tmp_path):
    folder = Path(__file__).parents[2] / "examples" / "nvflare"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH"))))}
    words = [sys.executable, "federation.py", "--out", tmp_path, "--audit", "none"]
    subprocess.run(words, check=True, timeout=600, env=environment, cwd=folder)
    for client in ("site-1", "site-2"):
        assert [dm.read_capture(path).round for path in captures_in(tmp_path / "captures" / client)] == [0, 1]
