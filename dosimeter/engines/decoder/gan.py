"""A generator that is trained against a critic on auxiliary images: it draws pictures from random numbers, and sees no model."""

from __future__ import annotations

import time

import torch
from torch import Generator, Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm

from dosimeter.engines.decoder.network import Decoder, Shape, default_width
from dosimeter.progress import advance
from dosimeter.randomness import global_seed

BATCH = 32
RATE, MOMENTA = 5e-4, (0.5, 0.9)  # of both networks' Adam
CRITIC_RATE = 2.0  # the critic's step, in the generator's
LEAST_SIDE = 4  # pixels of the critic's last map


def train_gan(pixels: Tensor, *, dimensions: int, width: int | None, epochs: int, rng: Generator, seconds: float | None = None) -> Decoder:
    """A generator (n, dimensions) -> (n, *image), trained on pictures (N, *image) in [0, 1].

    Goodfellow et al., "Generative Adversarial Nets", NeurIPS 2014, with the hinge loss and a critic under spectral norms (Miyato et al.,
    ICLR 2018), as BigGAN has them. The generator has the decoders' architecture.
    """
    began, device = time.monotonic(), pixels.device
    image = (pixels.shape[1], pixels.shape[2], pixels.shape[3])
    with global_seed(rng.initial_seed(), "generative adversarial network"):
        drawer = Decoder(Shape(feature=(dimensions, 1, 1), image=image, width=width or default_width(image))).to(device).train()
        critic = _critic(image, max(16, (width or default_width(image)) // 2)).to(device).train()
    mine = torch.optim.Adam(drawer.parameters(), lr=RATE, betas=MOMENTA)
    theirs = torch.optim.Adam(critic.parameters(), lr=CRITIC_RATE * RATE, betas=MOMENTA)

    def drawn(count: int) -> Tensor:
        return drawer(torch.randn(count, dimensions, generator=rng, device=rng.device).to(pixels))

    with torch.enable_grad():
        for epoch in range(epochs):
            order = torch.randperm(len(pixels), generator=rng, device=rng.device).to(device)
            for chosen in order.split(BATCH):
                if len(chosen) < 2:
                    continue  # batch norm needs two
                with torch.no_grad():
                    false = drawn(len(chosen))
                loss = (1 - critic(pixels[chosen])).relu().mean() + (1 + critic(false)).relu().mean()
                theirs.zero_grad()
                loss.backward()
                theirs.step()
                mine.zero_grad()
                (-critic(drawn(len(chosen))).mean()).backward()
                mine.step()
            advance(epoch + 1, epochs, "epochs of the generator")
            if seconds is not None and time.monotonic() - began > seconds:
                break
    return drawer.eval().requires_grad_(False)


def _critic(image: tuple[int, int, int], width: int) -> nn.Sequential:
    """Picture (n, *image) -> how real it looks (n, 1)."""
    layers: list[nn.Module] = [spectral_norm(nn.Conv2d(image[0], width, 3, padding=1)), nn.LeakyReLU(0.2)]
    rows, columns = image[1], image[2]
    while min(rows, columns) > LEAST_SIDE:
        layers += [spectral_norm(nn.Conv2d(width, width, 4, stride=2, padding=1)), nn.LeakyReLU(0.2)]
        rows, columns = rows // 2, columns // 2
    return nn.Sequential(*layers, nn.Flatten(), spectral_norm(nn.Linear(width * rows * columns, 1)))
