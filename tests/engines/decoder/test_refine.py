"""Refinement by feature matching: towards the truth where the feature is exact, each sample on its own, never worse."""

import pytest
import torch
from torch import nn

from dosimeter.engines.decoder.refine import Refinement, gain
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import train_decoder
from dosimeter.types import Normalization


@pytest.fixture
def view():
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(512, 10))
    return Target.from_model(model.eval(), (1, 8, 8), Normalization(mean=(0.2,), std=(0.7,)))


def test_images_move_to_the_ones_that_the_features_come_from(view, digits, rng):
    truth = digits[0][:4]
    start = (truth + 0.2 * torch.randn(truth.shape, generator=rng)).clamp(0, 1)
    found, left = Refinement(steps=150, total_variation=0.0)(view, start, view.features(truth))
    before, after = (start - truth).square().mean(), (found - truth).square().mean()
    assert float(after) < 0.02 * float(before)
    assert float(left.max()) < 0.02
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_in_eval_mode_samples_are_independent(view, digits):
    truth = digits[0][:3]
    start = truth.roll(1, 0)
    together, _ = Refinement(steps=10)(view, start, view.features(truth))
    alone = torch.cat([Refinement(steps=10)(view, start[i : i + 1], view.features(truth)[i : i + 1])[0] for i in range(3)])
    assert torch.allclose(together, alone, atol=1e-4)  # Adam makes steps out of gradients that are rounding; ten steps move .06


def test_at_the_answer_it_stays(view, digits):
    truth = digits[0][:2]
    found, left = Refinement(steps=5, total_variation=0.0)(view, truth, view.features(truth))
    assert torch.equal(found, truth)
    assert float(left.max()) < 1e-6


def test_the_model_is_left_as_it_was(view, digits):
    before = {name: tensor.clone() for name, tensor in view.model.state_dict().items()}
    Refinement(steps=2)(view, digits[0][:2], view.features(digits[0][2:4]))
    assert all(torch.equal(before[name], tensor) for name, tensor in view.model.state_dict().items())


def test_the_gain_on_auxiliary_images_tells_whether_it_helps(view, digits):
    """Towards exact features it helps; at a huge total variation it erases the picture, and the server sees that."""
    decoder = train_decoder(view, digits[0][500:700], DecoderSettings(width=16, epochs=3)).decoder
    pixels = digits[0][500:508]
    assert gain(Refinement(steps=60), view, decoder, pixels) > 3
    assert gain(Refinement(steps=60, total_variation=1000.0, learning_rate=0.1), view, decoder, pixels) < 0
