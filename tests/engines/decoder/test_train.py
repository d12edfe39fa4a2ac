"""Training: what it learns, that a killed one resumes to the same bits, and what it refuses."""

import itertools
import re
from types import SimpleNamespace

import pytest
import torch

from dosimeter.artefacts import CheckpointFile
from dosimeter.engines.decoder import training_set
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.train import decode_without_slope, train_decoder
from dosimeter.progress import listening
from dosimeter.types import Normalization, Refused

SMALL = DecoderSettings(width=16, epochs=3, batch_size=25)


@pytest.fixture
def view(normed_classifier):
    return Target.from_model(normed_classifier.train(), (1, 8, 8), Normalization())


def test_images_that_it_never_saw_come_back_from_their_features(view, digits):
    """Held-out digits from unpooled features: far nearer than their mean, and better the longer the training."""
    images = digits[0]
    errors = []
    for epochs in (1, 8):
        result = train_decoder(view, images[:500], DecoderSettings(width=32, epochs=epochs, batch_size=25))
        drawn = decode_without_slope(result.decoder, view.features(images[600:632]))
        errors.append(float((drawn - images[600:632]).square().mean()))
    variance = float((images[600:632] - images[:500].mean(0)).square().mean())
    assert errors[1] < 0.1 * variance
    assert errors[1] < errors[0]


def test_the_same_seed_gives_the_same_decoder_whatever_the_global_state(view, digits):
    first = train_decoder(view, digits[0][:50], SMALL).decoder.state_dict()
    torch.rand(3)
    again = train_decoder(view, digits[0][:50], SMALL).decoder.state_dict()
    other = train_decoder(view, digits[0][:50], DecoderSettings(width=16, epochs=3, batch_size=25, seed=1)).decoder.state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["exit.weight"], other["exit.weight"])


class Killed(Exception):
    pass


def test_a_killed_training_resumes_to_the_same_bits(view, digits, tmp_path):
    whole = train_decoder(view, digits[0][:50], SMALL).decoder.state_dict()
    steps = 0

    def kill(done: int, total: int, note: str) -> None:
        nonlocal steps
        steps += 1
        if done == 5:  # two steps an epoch: in the middle of the third
            raise Killed

    keep = CheckpointFile(tmp_path / "decoder.progress", every=0.0)
    with pytest.raises(Killed), listening(kill):
        train_decoder(view, digits[0][:50], SMALL, keep)
    assert keep.path.is_file()
    before, steps = steps, 0
    with listening(lambda done, total, note: kill(done + 100, total, note)):
        resumed = train_decoder(view, digits[0][:50], SMALL, keep).decoder.state_dict()
    assert (before, steps) == (5, 2)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert not keep.path.exists()


def test_a_torn_progress_file_is_begun_anew(view, digits, tmp_path):
    keep = CheckpointFile(tmp_path / "decoder.progress", every=0.0)
    keep.path.write_bytes(b"torn")
    result = train_decoder(view, digits[0][:50], SMALL, keep)
    expected = train_decoder(view, digits[0][:50], SMALL).decoder.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in result.decoder.state_dict().items())


def test_features_held_in_pieces_teach_as_well(view, digits, monkeypatch):
    monkeypatch.setattr(training_set, "HELD", (4 * 256 + 64) * 64)  # 64 images at a time
    result = train_decoder(view, digits[0][:300], DecoderSettings(width=16, epochs=6, batch_size=16))
    assert result.error < 0.05


def test_fine_tuning_runs_and_says_what_it_lacks(view, digits, monkeypatch):
    monkeypatch.setenv("DOSIMETER_LPIPS_WEIGHTS", "/nowhere")
    result = train_decoder(view, digits[0][:40], DecoderSettings(width=8, epochs=1, fine_tuning_epochs=1))
    assert "without LPIPS" in result.notes[0]


def test_a_training_that_leaves_the_finite_numbers_is_no_decoder(view, digits):
    broken = digits[0][:50].clone()
    broken[3] = torch.nan
    with pytest.raises(Refused, match="left the finite numbers; try a smaller learning_rate"):
        train_decoder(view, broken, SMALL)


def test_what_cannot_teach_is_refused(view, digits):
    with pytest.raises(Refused, match="8 are the least"):
        train_decoder(view, digits[0][:7], SMALL)
    with pytest.raises(ValueError, match="1 channels"):
        train_decoder(view, torch.rand(9, 3, 8, 8), SMALL)
    with pytest.raises(ValueError, match="client_batch_sizes"):
        DecoderSettings(client_batch_sizes=())
    with pytest.raises(ValueError, match="epochs: expected a positive int"):
        DecoderSettings(epochs=0)


def test_it_ends_with_its_time_and_a_resumed_one_has_only_what_is_left(view, digits, tmp_path, monkeypatch):
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks) / 100)
    monkeypatch.setattr("dosimeter.engines.decoder.train.time", clock)  # a clock that a busy machine does not move
    settings = DecoderSettings(width=16, epochs=100_000, batch_size=25, seconds=1.0)
    result = train_decoder(view, digits[0][:50], settings)
    assert 1.0 <= result.seconds < 5.0
    assert result.error < 0.2
    assert re.fullmatch(r"its training was cut at 1 s, after \d+ of 200000 steps", result.notes[0])
    keep = CheckpointFile(tmp_path / "decoder.progress", every=0.0)

    def kill(done: int, total: int, note: str) -> None:
        if done == 21:
            raise Killed

    with pytest.raises(Killed), listening(kill):
        train_decoder(view, digits[0][:50], settings, keep)
    found = keep.load()
    assert found is not None
    tensors, facts = found
    assert facts["epoch"] == "10"
    keep.save(tensors | {"elapsed": torch.tensor(0.9)}, facts)
    steps = []
    with listening(lambda done, total, note: steps.append(done)):
        resumed = train_decoder(view, digits[0][:50], settings, keep)
    assert steps[0] == 21
    assert 1.0 <= resumed.seconds < 5.0
    with pytest.raises(Refused, match="over before its first step: the features of 50"):
        train_decoder(view, digits[0][:50], DecoderSettings(width=16, seconds=1e-6))


def test_halved_precision_teaches_nearly_as_well(view, digits):
    whole, half = (
        train_decoder(view, digits[0][:200], DecoderSettings(width=16, epochs=4, batch_size=25, precision=precision))
        for precision in ("fp32", "bf16")
    )
    assert half.error == pytest.approx(whole.error, rel=0.1)
    assert half.decoder.exit.weight.dtype == torch.float32
