"""What a decoder's training takes: counted before, and refused where memory is short."""

import pytest
import torch

from dosimeter.engines.decoder import cost
from dosimeter.engines.decoder.cache import train_or_load
from dosimeter.engines.decoder.cost import memory_lacking, training_cost
from dosimeter.engines.decoder.network import Decoder
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.types import Normalization, Refused

SMALL = DecoderSettings(width=8, epochs=2, batch_size=16)


@pytest.fixture
def target(normed_classifier):
    return Target.from_model(normed_classifier.eval(), (1, 8, 8), Normalization())


def test_time_grows_with_images_epochs_and_width(target):
    one, two = (training_cost(target, images, SMALL) for images in (100, 200))
    assert two.epoch == pytest.approx(2 * one.epoch)
    assert two.features == pytest.approx(2 * one.features)
    assert one.seconds(7) == pytest.approx(one.features + 7 * one.epoch)
    wide = training_cost(target, 100, DecoderSettings(width=64, epochs=2, batch_size=16))
    assert wide.epoch > 4 * one.epoch


def test_what_a_step_holds_is_at_least_what_autograd_saves(target):
    settings = DecoderSettings(width=64, batch_size=16)
    decoder = Decoder(settings.shape_for(target)).train()
    saved: dict[int, int] = {}

    def count(tensor):
        saved[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
        decoder(torch.rand(16, target.feature_shape[0] * target.feature_shape[1] * target.feature_shape[2])).sum()
    assert sum(saved.values()) < training_cost(target, 100, settings).memory < 6 * sum(saved.values())


def test_a_training_that_does_not_fit_is_refused_before_it_starts(target, digits, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert memory_lacking(target, 100, SMALL) == ""
    monkeypatch.setattr(cost, "spare_memory", lambda: 1000)
    with pytest.raises(Refused, match=r"training the decoder needs about .* of memory, 1000 bytes are free; a smaller width"):
        train_or_load(target, digits[0][:40], SMALL)
    assert not list(tmp_path.rglob("*.safetensors"))
