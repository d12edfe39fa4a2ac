"""The model and the data of the example's clients."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from dosimeter.data.load import load_images

SAMPLES, LEARNING_RATE = 8, 0.05


class DigitNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10)
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.body(images)


def samples_of(site: str) -> tuple[Tensor, Tensor]:
    """The digits of a client such as "site-2"."""
    digits, first = load_images("digits"), int(site.rpartition("-")[2]) * SAMPLES
    return digits.images[first : first + SAMPLES].float(), digits.labels[first : first + SAMPLES]
