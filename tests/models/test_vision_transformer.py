"""The vision transformer: its parameters by hand, its tokens, and sizes that do not fit."""

import pytest
import torch

from dosimeter.options import OptionError
from dosimeter.registry import MODELS


def test_vit_b_16_has_the_published_number_of_parameters() -> None:
    with torch.device("meta"):
        model = MODELS.build("vit", classes=1000, size=224, patch=16, width=768, layers=12, heads=12)
    assert sum(parameter.numel() for parameter in model.parameters()) == 86_567_656  # torchvision's vit_b_16


def test_the_head_sees_every_patch_and_no_place_alone() -> None:
    torch.manual_seed(0)
    model = MODELS.build("vit", channels=1, size=8, patch=4, width=16, layers=1, heads=2).eval()
    image = torch.rand(1, 1, 8, 8)
    swapped = torch.cat([image[..., 4:, :], image[..., :4, :]], -2)
    assert not torch.allclose(model(image), model(swapped), atol=1e-6)  # places tell patches apart
    with torch.no_grad():
        model.places.zero_()
    assert torch.allclose(model(image), model(swapped), atol=1e-6)


@pytest.mark.parametrize(("options", "word"), [({"patch": 5}, "patch"), ({"heads": 3}, "heads")])
def test_what_does_not_divide_is_refused(options: dict, word: str) -> None:
    with pytest.raises(OptionError, match=word):
        MODELS.build("vit", **options)
