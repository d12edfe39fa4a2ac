"""A soft rectifier is the mean of rectifiers behind normal errors, and a hard one in the limit."""

import torch
from torch import Generator, nn

from dosimeter.engines.downward.softening import passing_share, soft_rectifier

MAPS = torch.randn(2, 50, generator=Generator().manual_seed(0), dtype=torch.float64)


def test_it_is_the_mean_over_errors() -> None:
    softness = torch.tensor([0.3, 1.0], dtype=torch.float64)
    width = softness * MAPS.square().mean(1).sqrt()
    drawn = MAPS + width[:, None] * torch.randn(20000, 2, 50, generator=Generator().manual_seed(1), dtype=torch.float64)
    torch.testing.assert_close(soft_rectifier(MAPS, softness), drawn.relu().mean(0), atol=0.04, rtol=0)
    torch.testing.assert_close(passing_share(MAPS, softness), (drawn > 0).double().mean(0), atol=0.04, rtol=0)


def test_without_softness_it_is_the_rectifier() -> None:
    torch.testing.assert_close(soft_rectifier(MAPS, torch.zeros(2)), nn.functional.relu(MAPS))
