import json
import tomllib
from dataclasses import dataclass, field
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dosimeter.client.losses import CrossEntropy, Focal
from dosimeter.client.training import FedAvg, FedSGD
from dosimeter.config import construct, describe, digest, override, read_toml, resolve_paths
from dosimeter.interfaces import Loss, Training
from dosimeter.options import Fraction, PositiveInt, check_fields
from dosimeter.registry import RENAMED


@dataclass(frozen=True, kw_only=True)
class Inner:
    name: str = "x"
    options: dict = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Outer:
    loss: Loss = field(default_factory=CrossEntropy)
    trainings: tuple[Training, ...] = ()
    inner: Inner = field(default_factory=Inner)
    steps: PositiveInt = 3
    share: Fraction = 0.5
    limit: float | None = None
    choice: Literal["a", "b"] = "a"
    which: Literal["all"] | tuple[Loss, ...] = "all"

    def __post_init__(self):
        check_fields(self)


losses = st.one_of(
    st.builds(
        CrossEntropy,
        smoothing=st.floats(0, 1),
        convention=st.sampled_from(["pytorch", "thesis"]),
        temperature=st.floats(1e-3, 1e3),
    ),
    st.builds(Focal, gamma=st.floats(0, 10)),
)
trainings = st.one_of(
    st.just(FedSGD()),
    st.builds(FedAvg, steps=st.none() | st.integers(1, 99), learning_rate=st.floats(1e-9, 10, exclude_min=True), momentum=st.floats(0, 1)),
)
configurations = st.builds(
    Outer,
    loss=losses,
    trainings=st.lists(trainings, max_size=3).map(tuple),
    inner=st.builds(Inner, name=st.text(max_size=8), options=st.dictionaries(st.from_regex(r"[a-z]{6,9}", fullmatch=True), st.integers())),
    limit=st.none() | st.floats(allow_nan=False),
    which=st.just("all") | st.lists(losses, max_size=2).map(tuple),
)


@given(configurations)
def test_round_trips_are_exact(config):
    assert construct(Outer, describe(config)) == config
    assert construct(Outer, json.loads(json.dumps(describe(config), allow_nan=False))) == config
    assert digest(construct(Outer, describe(config))) == digest(config)


def test_a_toml_file_says_the_same():
    text = """
    steps = 7
    limit = inf
    which = ["focal", { name = "cross_entropy", smoothing = 0.1 }]
    [loss]
    name = "focal"
    gamma = 1
    [inner]
    name = "y"
    depth = 2
    [[trainings]]
    name = "fedavg"
    steps = 4
    """
    expected = Outer(
        steps=7,
        limit=float("inf"),
        which=(Focal(), CrossEntropy(smoothing=0.1)),
        loss=Focal(gamma=1.0),
        inner=Inner(name="y", options={"depth": 2}),
        trainings=(FedAvg(steps=4),),
    )
    assert construct(Outer, tomllib.loads(text)) == expected


@pytest.mark.parametrize(
    ("key", "data", "sentence"),
    [
        ("loss focus", {"loss": "focus"}, "loss: 'focus' is now 'focal'"),
        ("loss focal.focusing", {"which": [{"name": "focal", "focusing": 2}]}, "which[0]: 'focusing' is now 'focal'"),
        ("inside", {"inside": {}}, "'inside' is now 'focal'"),
        ("other.nested", {"other": {"nested": 1}}, "other: 'nested' is now 'focal'"),
    ],
)
def test_an_old_spelling_is_refused_with_the_new_one(key, data, sentence, monkeypatch):
    @dataclass(frozen=True, kw_only=True)
    class Nested:
        steps: int = 0

    @dataclass(frozen=True, kw_only=True)
    class Config(Outer):
        other: Nested = field(default_factory=Nested)

    Config.__annotations__["other"] = Nested
    monkeypatch.setitem(RENAMED, key, "'focal'")
    with pytest.raises(ValueError) as raised:
        construct(Config, data)
    assert str(raised.value) == sentence


def test_short_forms_and_overrides():
    data = override(
        {"loss": "focal", "trainings": ["fedavg"]}, ["loss.gamma=1.5", "trainings.0.steps=4", "steps=7", "choice=b", "inner.depth=2"]
    )
    config = construct(Outer, data)
    assert config.loss == Focal(gamma=1.5)
    assert config.trainings == (FedAvg(steps=4),)
    assert (config.steps, config.choice, config.inner.options) == (7, "b", {"depth": 2})


def test_the_digest_sees_content_not_order():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1}) != digest({"a": 1, "b": 3})


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ({"steps": -3}, "steps: expected a positive int, got -3"),
        ({"steps": True}, "steps: expected an int, got True"),
        ({"step": 1}, "step: no such key; did you mean 'steps'?"),
        ({"loss": "focl"}, "loss: no loss named 'focl'; did you mean 'focal'?"),
        ({"loss": {"name": "focal", "gamma": "high"}}, "loss.gamma: expected a number, got 'high'"),
        ({"loss": {"gamma": 1}}, "loss: expected the name of a loss, or a table with its `name` and options, got {'gamma': 1}"),
        ({"trainings": [{"name": "fedavg", "steps": 0}]}, "trainings[0].steps: expected a positive int or none, got 0"),
        ({"choice": "c"}, "choice: expected one of 'a', 'b', got 'c'"),
        ({"inner": 3}, "inner: expected a table, got 3"),
        ({"which": [{"name": "focal", "gamma": -1}]}, "which[0].gamma: expected a number of at least 0, got -1"),
    ],
)
def test_errors_name_the_path(data, sentence):
    with pytest.raises(ValueError) as raised:
        construct(Outer, data)
    assert sentence.replace(" or none", "") in str(raised.value)


def test_bad_assignments():
    with pytest.raises(ValueError, match="expected key=value, got 'steps'"):
        override({}, ["steps"])
    with pytest.raises(ValueError, match="steps: is not a table"):
        override({"steps": 3}, ["steps.more=1"])


def test_options_that_are_no_table_are_refused():
    from dosimeter.runs.audited_client import Experiment

    with pytest.raises(ValueError, match=r"model.options: expected a table, got '\['"):
        construct(Experiment, override({}, ["model.options=["]))


@pytest.mark.parametrize("text", ["x = 1979-05-27", "x = [07:32:00]", "x = " + "[" * 3000, "x = 0x" + "f" * 9999])
def test_values_that_no_option_takes_are_one_sentence(tmp_path, text):
    path = tmp_path / "audit.toml"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"expected|not a TOML file|nested"):
        construct(dict[str, str], read_toml(path))


def test_paths_of_a_file_are_relative_to_the_file(tmp_path):
    (tmp_path / "photos").mkdir()
    content = {
        "model": {"name": "lenet5", "weights": "w.safetensors"},
        "data": {"name": "photos"},
        "attacks": [{"name": "fgla", "decoder": "d.pt"}],
    }
    found = resolve_paths(content, tmp_path)
    assert found["model"] == {"name": "lenet5", "weights": str(tmp_path / "w.safetensors")}
    assert found["data"]["name"] == str(tmp_path / "photos")
    assert found["attacks"][0]["decoder"] == str(tmp_path / "d.pt")


@pytest.mark.parametrize("name", ["photographs", "/abs/set.npz", "~/set.npz"])
def test_bundled_sets_and_absolute_paths_stay(tmp_path, name):
    assert resolve_paths({"data": {"name": name}}, tmp_path) == {"data": {"name": name}}
    assert resolve_paths({"data": name}, tmp_path) == {"data": name}
    assert resolve_paths({"data": "sets/x"}, tmp_path) == {"data": str(tmp_path / "sets" / "x")}


def test_numbers_that_no_option_takes_are_refused_in_a_sentence(tmp_path):
    file = tmp_path / "a.toml"
    file.write_text(f"seed = {'9' * 5001}")
    with pytest.raises(ValueError, match="a number has more than 4,300 digits"):
        read_toml(file)
    file.write_text(f"seed = 0x{'f' * 5001}")
    with pytest.raises(ValueError, match="seed: expected a number of at most 1024 bits, got one of 20004"):
        read_toml(file)
    with pytest.raises(ValueError, match="expected an index below 1, got '²'"):
        override({"defenses": ["sign"]}, ["defenses.²=3"])


@dataclass(frozen=True, kw_only=True)
class Needy:
    steps: PositiveInt
    rate: float = 0.1


def test_a_key_that_is_missing_is_named():
    with pytest.raises(ValueError, match="steps: expected a positive int, got nothing"):
        construct(Needy, {"rate": 0.5})
    assert construct(Needy, {"steps": 3}).rate == 0.1
