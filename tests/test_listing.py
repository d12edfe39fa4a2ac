"""The catalogue of all methods, read from the code."""

import json

import pytest

from dosimeter.listing import catalogue, registries


def entry(kind: str, name: str) -> dict:
    return next(entry for entry in catalogue(kind) if entry["name"] == name)


def test_an_entry_says_idea_source_needs_and_options():
    dlg = entry("attacks", "dlg")
    assert dlg["idea"]
    assert dlg["source"]
    options = {option["name"]: option for option in dlg["options"]}
    assert (options["steps"]["type"], options["steps"]["required"]) == ("a positive int", False)
    assert isinstance(options["steps"]["default"], int)
    targets = {option["name"]: option for option in entry("attacks", "gradfilt")["options"]}["targets"]
    assert (targets["required"], targets["default"]) == (True, None)
    assert entry("labels", "ilrg")["needs"] == sorted(entry("labels", "ilrg")["needs"])
    assert "head bias gradient" in entry("labels", "ilrg")["needs"]


def test_defenses_alone_say_what_they_promise_and_break():
    assert {"promise", "breaks"} <= set(entry("defenses", "gaussian_noise"))
    assert not {"promise", "breaks"} & set(entry("losses", "focal"))


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="did you mean 'attacks'"):
        catalogue("attack")


def test_the_catalogue_is_complete_and_plain():
    entries = catalogue()
    assert {(entry["kind"], entry["name"]) for entry in entries} == {
        (kind, name) for kind, registry in registries().items() for name in registry
    }
    json.dumps(entries, allow_nan=False)
