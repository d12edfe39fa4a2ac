"""The decoder's sizes, its range, and that it does not care about a feature's scale."""

import pytest
import torch

from dosimeter.engines.decoder.network import Decoder, Shape, default_width


@pytest.mark.parametrize(
    ("feature", "image", "stages"),
    [
        ((2048, 7, 7), (3, 224, 224), 5),  # RGLA's, five stages as in the paper
        ((2048, 1, 1), (3, 224, 224), 5),  # pooled: spread over 7 x 7 first
        ((16, 11, 11), (3, 336, 336), 5),
        ((64, 8, 8), (3, 32, 32), 2),
        ((12, 1, 1), (1, 8, 8), 1),
        ((20, 1, 1), (1, 28, 28), 3),
        ((4, 8, 8), (1, 8, 8), 1),  # a map as large as the image still gets a stage
        ((6, 3, 5), (3, 20, 30), 3),
    ],
)
def test_the_stages_reach_the_image(feature, image, stages):
    shape = Shape(feature=feature, image=image, width=8)
    assert shape.stages == stages
    if max(image) > 100:
        return  # drawing it would take longer than it tells
    drawn = Decoder(shape).eval()(torch.randn(3, torch.Size(feature).numel())).detach()
    assert drawn.shape == (3, *image)
    assert 0 <= float(drawn.min()) < float(drawn.max()) <= 1


def test_width_follows_the_image():
    assert [default_width((3, side, side)) for side in (8, 32, 64, 224)] == [32, 128, 256, 512]


def test_standardised_features_make_their_scale_and_offset_irrelevant(rng):
    """A decoder that took the moments of 1000 f + 7 draws from it what one that took those of f draws from f."""
    features = torch.rand(50, 12 * 4, generator=rng)
    torch.manual_seed(0)
    decoder = Decoder(Shape(feature=(12, 2, 2), image=(3, 8, 8), width=8)).eval()
    decoder.standardise(features)
    plain = decoder(features[:5])
    decoder.standardise(1000 * features + 7)
    assert torch.allclose(plain, decoder(1000 * features[:5] + 7), atol=1e-4)
    by_hand = torch.stack([features[:, 4 * channel : 4 * channel + 4].mean() for channel in range(12)])
    decoder.standardise(features)
    assert torch.allclose(decoder.mean[:, 0, 0], by_hand, atol=1e-6)


def test_a_constant_feature_is_no_infinity():
    decoder = Decoder(Shape(feature=(2, 1, 1), image=(1, 8, 8), width=8)).eval()
    decoder.standardise(torch.stack([torch.full((9,), 3.0), torch.arange(9.0)], 1))
    assert decoder(torch.tensor([[3.0, 1.0]])).isfinite().all()


def test_a_decoder_may_draw_less_finely_than_the_image_and_scales_it_up():
    shape = Shape(feature=(6, 4, 4), image=(3, 64, 64), width=8, finest=16)
    assert shape.stages == 2
    assert Shape(feature=(2048, 7, 7), image=(3, 224, 224), finest=56).stages == 3
    decoder = Decoder(shape).eval()
    drawn = decoder(torch.randn(2, 96)).detach()
    assert drawn.shape == (2, 3, 64, 64)
    between = drawn[..., 2:62].unflatten(-1, (15, 4))  # four pixels between the centres of two that were drawn: on a line
    assert float(between.diff(n=2).abs().max()) < 1e-6
    assert float(between.diff().abs().max()) > 1e-4
