from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from dosimeter.models.loading import load_model
from dosimeter.options import OptionError
from dosimeter.registry import MODELS


@pytest.mark.parametrize(("activation", "learning_rate"), [("relu", 3e-3), ("sigmoid", 1e-2)])
def test_learns_the_digits_in_seconds(activation: str, learning_rate: float) -> None:
    from sklearn.datasets import load_digits

    digits = load_digits()
    inputs = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # pyright: ignore[reportAttributeAccessIssue]
    targets = torch.tensor(digits.target)  # pyright: ignore[reportAttributeAccessIssue]
    rng = torch.Generator().manual_seed(101)
    order = torch.randperm(len(inputs), generator=rng)
    seen, unseen = order[:1400], order[1400:]
    model = load_model("small_cnn", {"channels": 1, "size": 8, "activation": activation}, None, seed=101)
    optimiser = torch.optim.Adam(model.parameters(), learning_rate)
    for _ in range(12):
        for piece in seen[torch.randperm(len(seen), generator=rng)].split(64):
            optimiser.zero_grad()
            cross_entropy(model(inputs[piece]), targets[piece]).backward()
            optimiser.step()
    with torch.no_grad():
        accuracy = float((model(inputs[unseen]).argmax(1) == targets[unseen]).float().mean())
    assert accuracy > 0.95


@pytest.mark.parametrize(("size", "features"), [(8, 32 * 2 * 2), (9, 32 * 3 * 3), (32, 32 * 8 * 8), (64, 32 * 16 * 16)])
def test_features_follow_the_size(size: int, features: int) -> None:
    model = MODELS.build("small_cnn", size=size, channels=1)
    assert model.fc.in_features == features
    assert model(torch.rand(2, 1, size, size)).shape == (2, 10)


def test_a_constant_shift_of_the_logits_is_the_bias() -> None:
    model, inputs = MODELS.build("small_cnn", size=8), torch.rand(2, 3, 8, 8)
    before = model(inputs)
    model.fc.bias.data += torch.arange(10.0)
    assert torch.allclose(model(inputs) - before, torch.arange(10.0).expand(2, 10), atol=1e-5)


def test_unknown_initialisation_is_refused() -> None:
    with pytest.raises(OptionError, match=r"model\.initialisation: expected one of 'kaiming'"):
        MODELS.build("small_cnn", initialisation="orthogonal")
