"""`dosimeter generator train`: what it prints, where the decoder goes, and what it says to bad input."""

import json

import pytest

from dosimeter.cli import main

WORDS = ["data.name=digits", "data.auxiliary=40", "decoder.epochs=1", "decoder.width=8", "attacks=[]"]


def test_it_trains_once_and_tells_where(capsys, tmp_path):
    assert main(["generator", "train", *WORDS, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["images"] == 40
    assert first["path"].startswith(str(tmp_path))
    assert main(["generator", "train", *WORDS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == first  # the seconds included: nothing was trained again


def test_the_attacks_of_the_same_audit_find_it(capsys, monkeypatch):
    from dosimeter.engines.decoder import cache

    assert main(["generator", "train", *WORDS, "decoder.epochs=2"]) == 0
    assert "auxiliary images" in capsys.readouterr().out
    monkeypatch.setattr(cache, "train_decoder", lambda *_: pytest.fail("trained again"))
    words = ["data.name=digits", "data.auxiliary=40", "attack.name=rgla", "attack.features=subspace", "attack.width=8", "attack.epochs=2"]
    assert main(["run", *words, "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert {"mean", "nearest", "foreign", "foreign features", "mean feature", "shuffled features"} == set(record["nulls"])


def test_a_file_of_ones_own(tmp_path, capsys):
    path = tmp_path / "mine.safetensors"
    assert main(["generator", "train", *WORDS, "--out", str(path)]) == 0
    assert path.is_file()
    assert str(path) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["data.auxiliary=0"], "data.auxiliary: expected at least one image"),
        (["decoder.epochs=-1"], "decoder.epochs: expected a positive int, got -1"),
        (["decoder.widht=9"], "decoder.widht: no such key; did you mean 'width'?"),
        (["devise=cuda"], "devise: no such key; did you mean 'device'?"),
        (["decoder.seconds=0"], "decoder.seconds: expected a positive number, got 0"),
        (["data.auxiliary=3"], "8 are the least"),
        (["data.name=/no/such/folder"], "/no/such/folder: no such file or folder"),
    ],
)
def test_bad_input_is_a_sentence(words, sentence, capsys):
    assert main(["generator", "train", "data.name=digits", *words]) == 2
    assert sentence in capsys.readouterr().err
