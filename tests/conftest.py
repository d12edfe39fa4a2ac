"""What several tests share: small classifiers, real images, and where the optional data lie."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from dosimeter.types import Batch

torch.set_num_threads(1)  # the workers of one run would otherwise fight over the cores
SHARED = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"the benchmark data are not at {SHARED}")
    return SHARED


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """Decoders and models that tests train go to a folder of their own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def rng() -> torch.Generator:
    return torch.Generator().manual_seed(20261116)


@pytest.fixture
def classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 12), nn.ReLU(), nn.Linear(12, 10)
        ).eval()


@pytest.fixture
def dead_classifier() -> nn.Module:
    """A classifier whose trained layer lets nothing through, so that every batch has a zero update."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10)).eval()
    nn.init.zeros_(model[1].weight)
    nn.init.constant_(model[1].bias, -1)
    model[3].requires_grad_(False)
    return model


@pytest.fixture
def normed_classifier() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


@pytest.fixture(scope="session")
def digits() -> tuple[Tensor, Tensor]:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    return torch.tensor(bunch.images / 16, dtype=torch.float32)[:, None], torch.tensor(bunch.target)


@pytest.fixture
def batch(digits: tuple[Tensor, Tensor]) -> Batch:
    images, labels = digits
    return Batch(images[100:106].clone(), labels[100:106].clone())
