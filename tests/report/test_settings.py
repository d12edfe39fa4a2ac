from dosimeter.report.settings import describe_part, group_by_setting, threat_model_lines


def test_one_setting_needs_no_name(single_setting):
    (setting,) = group_by_setting(single_setting)
    assert setting.name == ""
    assert setting.records == single_setting


def test_settings_are_named_by_what_differs(audit_records):
    assert [(setting.name, len(setting.records)) for setting in group_by_setting(audit_records)] == [
        ("no defense", 6),
        ("gaussian_noise (std 0.1)", 2),
    ]


def test_seeds_and_draws_do_not_split_a_setting(make_record):
    one, two = make_record("labels", "ilrg", seed=0), make_record("labels", "ilrg", seed=1)
    two.threat_model.update(batch_hash="another", accuracy=0.5)
    assert len(group_by_setting([one, two])) == 1


def test_any_other_difference_splits(make_record):
    one, two = make_record("labels", "ilrg"), make_record("labels", "ilrg")
    two.threat_model["batch_size"] = 64
    assert [s.name for s in group_by_setting([one, two])] == [
        "batch size 8, declared to the server",
        "batch size 64, declared to the server",
    ]


def test_the_threat_model_says_what_an_honest_audit_must(audit_records):
    lines = {line.name: line.values for line in threat_model_lines(audit_records)}
    assert lines["Mode"] == ["evaluation"]
    assert lines["Accuracy"] == ["91.3\u202f% of 126 held-out images"]
    assert lines["Defenses"] == ["none", "gaussian_noise (std 0.1)"]
    assert lines["Labels came from"] == ["given (subspace, direct)", "recovered by ilrg (inverting_gradients)", "optimised (dlg)"]
    assert lines["Shape of an input"] == ["3 × 32 × 32"]
    assert lines["Batch size"] == ["8, declared to the server"]


def test_every_key_is_optional_and_unknown_keys_are_shown(make_record):
    empty, strange = make_record("labels", "ilrg"), make_record("labels", "ilrg")
    empty.threat_model.clear()
    strange.threat_model.clear()
    strange.threat_model.update(local_clock="fast", accuracy=None, batch_size=None)
    assert threat_model_lines([empty]) == []
    assert {line.name: line.values for line in threat_model_lines([strange])} == {
        "Accuracy": ["not known"],
        "Batch size": ["not known"],
        "Local clock": ["fast"],
    }


def test_described():
    assert describe_part({"name": "fedsgd"}) == "fedsgd"
    assert describe_part({"name": "fedavg", "learning_rate": 0.1, "steps": 5}) == "fedavg (learning rate 0.1, steps 5)"
    assert describe_part("plain") == "plain"
