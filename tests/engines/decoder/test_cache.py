"""Decoders on disk: found again under what they depend on, and refused where they do not fit."""

import copy

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dosimeter.engines.decoder import cache
from dosimeter.engines.decoder.cache import load_decoder, train_or_load
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.progress import listening
from dosimeter.types import Normalization, Refused

SMALL = DecoderSettings(width=8, epochs=1)


def view_of(model, shape=(1, 8, 8)):
    return Target.from_model(model, shape, Normalization())


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_the_same_question_is_answered_from_disk(normed_classifier, digits, monkeypatch):
    view = view_of(normed_classifier)
    first = train_or_load(view, digits[0][:40], SMALL)
    monkeypatch.setattr(cache, "train_decoder", lambda *_: pytest.fail("trained again"))
    again = train_or_load(view, digits[0][:40], SMALL)
    assert again.path == first.path
    assert again.facts == first.facts
    features = view.features(digits[0][50:53])
    assert torch.equal(first.decoder(features), again.decoder(features))


@pytest.mark.parametrize("change", ["model", "auxiliary", "settings"])
def test_whatever_it_depends_on_has_a_decoder_of_its_own(normed_classifier, digits, change):
    view, pixels, settings = view_of(normed_classifier), digits[0][:40], SMALL
    first = train_or_load(view, pixels, settings)
    if change == "model":
        other = copy.deepcopy(normed_classifier)
        nn.init.normal_(other[0].weight)
        view = view_of(other)
    elif change == "auxiliary":
        pixels = pixels.clone()
        pixels[3, 0, 0, 0] = 1 - pixels[3, 0, 0, 0]
    else:
        settings = DecoderSettings(width=8, epochs=2)
    assert train_or_load(view, pixels, settings).path != first.path


def test_a_decoder_of_another_model_is_refused_in_a_sentence(normed_classifier, classifier, digits, tmp_path):
    path = tmp_path / "mine.safetensors"
    train_or_load(view_of(normed_classifier.eval()), digits[0][:40], SMALL, path)
    assert load_decoder(path, view_of(normed_classifier)).path == path
    with pytest.raises(Refused, match=r"from \(4, 8, 8\), but this model makes \(12, 1, 1\)"):
        load_decoder(path, view_of(classifier))
    with pytest.raises(Refused, match="in eval mode; the client's is in the other"):
        load_decoder(path, view_of(copy.deepcopy(normed_classifier).train()))
    other = copy.deepcopy(normed_classifier)
    nn.init.normal_(other[0].weight)
    with pytest.raises(Refused, match="other weights"):
        load_decoder(path, view_of(other))


def test_files_that_are_no_decoder_are_refused(normed_classifier, tmp_path):
    view = view_of(normed_classifier)
    with pytest.raises(FileNotFoundError, match="dosimeter generator train"):
        load_decoder(tmp_path / "none.safetensors", view)
    torn, stranger = tmp_path / "torn.safetensors", tmp_path / "stranger.safetensors"
    torn.write_bytes(b"nothing")
    with pytest.raises(Refused, match="truncated, damaged"):
        load_decoder(torn, view)
    save_file({"weight": torch.zeros(2)}, stranger)
    with pytest.raises(Refused, match="is not a decoder"):
        load_decoder(stranger, view)


def test_a_decoder_of_another_architecture_is_refused(normed_classifier, digits, tmp_path):
    view, path = view_of(normed_classifier), tmp_path / "old.safetensors"
    found = train_or_load(view, digits[0][:40], SMALL, path)
    tensors = {name: tensor for name, tensor in found.decoder.state_dict().items() if not name.startswith("opening.")}
    save_file(tensors, path, found.facts)
    with pytest.raises(Refused, match="another version of dosimeter; train it again"):
        load_decoder(path, view)


def test_a_killed_training_of_other_settings_is_not_gone_on_with(normed_classifier, digits, tmp_path, monkeypatch):
    """The same file, killed after an epoch under one learning rate and begun anew under another."""
    view, path = view_of(normed_classifier), tmp_path / "mine.safetensors"
    first, other = (DecoderSettings(width=8, epochs=3, learning_rate=rate) for rate in (1e-3, 2e-3))

    class Killed(Exception):
        pass

    def kill(done, total, note):
        if done == 5:
            raise Killed

    monkeypatch.setattr(cache, "SECONDS_BETWEEN_SAVES", 0.0)
    with pytest.raises(Killed), listening(kill):
        train_or_load(view, digits[0][:40], first, path)
    assert path.with_suffix(".progress").is_file()
    expected = train_or_load(view, digits[0][:40], other).decoder.state_dict()
    found = train_or_load(view, digits[0][:40], other, path).decoder.state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in found.items())


def test_a_decoder_whose_weights_were_changed_is_refused(normed_classifier, digits, tmp_path):
    view, path = view_of(normed_classifier), tmp_path / "zeroed.safetensors"
    found = train_or_load(view, digits[0][:40], SMALL, path)
    save_file({name: torch.zeros_like(tensor) for name, tensor in found.decoder.state_dict().items()}, path, found.facts)
    with pytest.raises(Refused, match="was changed after its training"):
        train_or_load(view, digits[0][:40], SMALL, path)


def without_hash(path, tensors, facts):
    save_file(tensors, path, {name: fact for name, fact in facts.items() if name != "weights"})


def without_error(path, tensors, facts):
    save_file(tensors, path, {name: fact for name, fact in facts.items() if name != "error"})


def with_zeros(path, tensors, facts):
    save_file({name: torch.zeros_like(tensor) for name, tensor in tensors.items()}, path, facts)


def with_half_the_bytes(path, tensors, facts):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def of_another_width(path, tensors, facts):
    save_file(tensors, path, facts | {"shape": facts["shape"].replace('"width": 8', '"width": -8')})


DAMAGES = [without_hash, without_error, with_zeros, with_half_the_bytes, of_another_width]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_old_or_damaged_decoder_in_the_cache_is_trained_anew_and_replaced(normed_classifier, digits, monkeypatch, damage):
    view = view_of(normed_classifier)
    first = train_or_load(view, digits[0][:40], SMALL)
    damage(first.path, first.decoder.state_dict(), first.facts)
    again = train_or_load(view, digits[0][:40], SMALL)
    assert again.path == first.path
    assert all(torch.equal(first.decoder.state_dict()[name], tensor) for name, tensor in again.decoder.state_dict().items())
    monkeypatch.setattr(cache, "train_decoder", lambda *_: pytest.fail("the file was not replaced"))
    assert train_or_load(view, digits[0][:40], SMALL).facts == again.facts
    assert [file.name for file in first.path.parent.iterdir()] == [first.path.name]


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_old_or_damaged_decoder_that_the_user_names_is_refused_and_stays(normed_classifier, digits, tmp_path, damage):
    view, path = view_of(normed_classifier), tmp_path / "mine.safetensors"
    found = train_or_load(view, digits[0][:40], SMALL, path)
    damage(path, found.decoder.state_dict(), found.facts)
    content = path.read_bytes()
    for use in (lambda: load_decoder(path, view), lambda: train_or_load(view, digits[0][:40], SMALL, path)):
        with pytest.raises(Refused, match=r"mine\.safetensors"):
            use()
    assert path.read_bytes() == content


@pytest.mark.parametrize("kind", ["text", "tensors", "link", "folder"])
def test_a_foreign_file_in_the_place_of_the_progress_is_refused_and_stays(normed_classifier, digits, tmp_path, kind):
    foreign, target = tmp_path / "mine.progress", tmp_path / "notes"
    target.write_text("notes")
    if kind == "text":
        foreign.write_text("notes")
    elif kind == "tensors":
        save_file({"weight": torch.zeros(2)}, foreign)
    elif kind == "link":
        foreign.symlink_to(target)
    else:
        foreign.mkdir()
    before = foreign.lstat().st_ino
    with pytest.raises(ValueError, match="in the way of the training's progress"):
        train_or_load(view_of(normed_classifier), digits[0][:40], SMALL, tmp_path / "mine.safetensors")
    assert foreign.lstat().st_ino == before
    assert target.read_text() == "notes"
    assert not (tmp_path / "mine.safetensors").exists()
