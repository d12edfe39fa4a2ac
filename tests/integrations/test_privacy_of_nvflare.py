"""Privacy settings against NVIDIA FLARE's own filters: what they send, and what their logs count."""

import numpy as np
import pytest

import dosimeter as dm

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'dosimeter[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.fl_context import FLContext
from nvflare.app_common.filters.percentile_privacy import PercentilePrivacy
from nvflare.app_common.filters.svt_privacy import SVTPrivacy


def test_the_filters_log_counts_less_than_the_choice_can_cost():
    tap = SVTPrivacy(fraction=0.1, epsilon=0.5, gamma=1.0, tau=0.1)
    rng = np.random.default_rng(0)
    dxo = DXO(DataKind.WEIGHT_DIFF, {"w": rng.normal(size=500)})
    tap.process_dxo(dxo, dxo.to_shareable(), FLContext())
    (entry,) = tap.get_privacy_ledger()
    setting = dm.privacy(tap, parameters=500)
    reading = setting.readings(1)[0]
    assert setting.choice() == pytest.approx((entry["epsilon_threshold"], entry["epsilon_query"]))
    assert setting.release == pytest.approx(entry["epsilon_release"])
    assert entry["epsilon_total"] < reading.proved
    assert reading.stated == 0.5


def test_more_entries_lie_above_the_threshold_than_are_sent():
    """Why the proof pays for all entries: the filter does not stop after as many as it sends."""
    tap, passes = SVTPrivacy(fraction=0.1, epsilon=0.5, gamma=1.0, tau=0.1, replace=False), []
    tap.log_debug = lambda context, said: passes.append(said)
    dxo = DXO(DataKind.WEIGHT_DIFF, {"w": np.ones(500)})
    tap.process_dxo(dxo, dxo.to_shareable(), FLContext())
    assert np.count_nonzero(dxo.data["w"]) == 50
    accepted = max(int(said.split("total ")[1].split("/")[0]) for said in passes if "acceptance pass" in said)
    assert accepted > 100


def test_scalars_pass_as_they_are():
    tap = SVTPrivacy(gamma=1.0)
    dxo = DXO(DataKind.WEIGHT_DIFF, {"w": np.ones(50), "count": np.array(7.0)})
    tap.process_dxo(dxo, dxo.to_shareable(), FLContext())
    assert float(dxo.data["count"]) == 7.0


def test_the_percentile_filter_is_deterministic():
    tap, found = PercentilePrivacy(percentile=50, gamma=1.0), []
    for _ in range(2):
        dxo = DXO(DataKind.WEIGHT_DIFF, {"w": np.linspace(-1, 1, 20)})
        found.append(tap.process_dxo(dxo, dxo.to_shareable(), FLContext()).data["w"])
    assert np.array_equal(*found)
    assert dm.privacy(tap).readings(1)[0].proved == float("inf")
