"""The shape that a model takes, and its head, where nobody says them."""

import pytest
import torch
from torch import nn

from dosimeter.network.input_shape import find_head_name, find_input_shape
from dosimeter.types import Refused


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (nn.Sequential(nn.Flatten(), nn.Linear(3 * 5 * 5, 4)), (3, 5, 5)),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 4)), (1, 8, 8)),
        (nn.Linear(7, 4), (7,)),
        (nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(4 * 9 * 9, 4)), (2, 11, 11)),
        (nn.Sequential(nn.Conv2d(3, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)), (3, 32, 32)),
        (nn.Sequential(nn.Conv2d(3, 4, 7, stride=2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 4)), (3, 224, 224)),
    ],
)
def test_the_shape_that_passes_is_found_and_the_model_stays(model, shape):
    model.train()
    assert find_input_shape(model) == shape
    assert model.training
    assert all(parameter.device.type == "cpu" for parameter in model.parameters())


def test_the_head_is_found_with_a_shape_or_without(classifier):
    assert find_head_name(classifier, None) == find_head_name(classifier, (1, 8, 8)) == "5"
    with pytest.raises(ValueError, match=r"attack\.input_shape"):
        find_head_name(classifier, (1, 9, 9))


class OneSize(nn.Module):
    """Asserts its one size, as timm's vision transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.head = nn.Conv2d(3, 4, 16, 16), nn.Linear(4, 2)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        assert pictures.shape[-2:] == (48, 48)
        return self.head(self.patches(pictures).flatten(2).mean(2))


def test_a_model_that_asserts_its_size_is_tried_at_every_size():
    assert find_input_shape(OneSize()) == (3, 48, 48)


class Sequence(nn.Module):
    """Takes tokens, which are no floating-point inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(5, 4), nn.Linear(4, 2)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.words(tokens).mean(1))


def test_a_model_that_no_common_shape_passes_is_refused():
    with pytest.raises(Refused, match="no common shape"):
        find_input_shape(Sequence())
