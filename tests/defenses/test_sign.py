import pytest
import torch

import dosimeter as dm
from dosimeter.randomness import generator

RNG = generator(0, "unused")


def test_signs_with_the_mean_magnitude_of_each_layer():
    update = {"a": torch.tensor([[3.0, -1.0], [0.0, -4.0]]), "b": torch.tensor([-10.0])}
    sent = dm.defense("sign").protect(update, RNG)
    assert sent["a"].tolist() == [[2.0, -2.0], [0.0, -2.0]]
    assert sent["b"].tolist() == [-10.0]


def test_unscaled_signs_are_signs():
    assert dm.defense("sign", scaled=False).protect({"a": torch.tensor([3.0, -0.1])}, RNG)["a"].tolist() == [1.0, -1.0]


def test_the_scaled_signs_are_the_best_multiple_of_the_signs():
    gradient = torch.randn(500, generator=generator(1, "gradient"), dtype=torch.float64)
    sent = dm.defense("sign").protect({"a": gradient}, RNG)["a"]
    best = (gradient @ gradient.sign()) / (gradient.sign() @ gradient.sign())
    assert torch.allclose(sent, best * gradient.sign())


def test_an_unknown_option_is_refused():
    with pytest.raises(ValueError, match="did you mean 'scaled'"):
        dm.defense("sign", scale=1.0)
