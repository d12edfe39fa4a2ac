from dosimeter.terminal.catalogue import print_catalogue

NOISE = {
    "kind": "defenses",
    "name": "noise",
    "idea": "Adds noise.",
    "source": "",
    "needs": [],
    "promise": "nothing",
    "breaks": "accuracy",
    "options": [
        {"name": "std", "type": "a number", "required": True, "default": None},
        {"name": "relative", "type": "true or false", "required": False, "default": False},
    ],
}
COUNT = {"kind": "labels", "name": "count", "idea": "Counts labels.", "source": "", "needs": ["batch size", "labels"], "options": []}


def test_each_kind_is_headed_once_and_each_method_has_its_facts(capsys):
    print_catalogue([NOISE, NOISE | {"name": "clip"}, COUNT])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines() if line.strip()]
    assert lines.count("defenses") == lines.count("labels") == 1
    assert lines[1:6] == [
        "noise  Adds noise.",
        "promises: nothing",
        "breaks: accuracy",
        "std: a number, required",
        "relative: true or false, default False",
    ]
    assert lines[-2:] == ["count  Counts labels.", "needs: batch size, labels"]
