"""Real digits as a batch, and no weights that lie on the machine by chance."""

import pytest
import torch
from sklearn.datasets import load_digits

import dosimeter as dm


@pytest.fixture(autouse=True)
def _no_weights_from_the_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("DOSIMETER_LPIPS_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


@pytest.fixture(scope="module")
def digits() -> dm.Batch:
    bunch = load_digits()
    return dm.Batch(torch.from_numpy(bunch.images[:200, None] / 16).float(), torch.from_numpy(bunch.target[:200]))
