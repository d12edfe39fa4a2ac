"""Code that a configuration names: what runs it, what does not, and where it is looked for."""

import sys

import pytest
from torch import nn

from dosimeter.models.loading import load_model
from dosimeter.models.named_code import allow_code, find_function, working_directory_last
from dosimeter.options import OptionError

NETWORK = """
from os import popen, system
from functools import partial
from pathlib import Path
from torch import nn
from torch.hub import load

Path("trace").touch()

class Net(nn.Linear):
    def __init__(self, width=4):
        super().__init__(width, 3)

def build(width=4):
    return Net(width)

def command(text="touch called"):
    return system(text)

def count(text: str = "touch called") -> int:
    return system(text)

def nothing(text: str = "touch called") -> None:
    system(text)

def annotated(width: int = 4) -> nn.Module:
    return Net(width)

def unknown(width: "Width" = 4) -> "Network":
    return Net(width)

half_built = partial(build, 3)
"""


@pytest.fixture
def network(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "strangers_network.py").write_text(NETWORK)
    yield "strangers_network"
    sys.modules.pop("strangers_network", None)


def test_a_named_module_stays_shut_until_it_is_allowed(network, tmp_path):
    for allowed in ((), ("torch",), ("strangers",), ("strangers_network.models",)):
        with (
            allow_code(allowed),
            pytest.raises(OptionError, match=r"a configuration alone does not run; .* --allow-code strangers_network"),
        ):
            load_model(f"{network}:build", {}, None, seed=0)
        assert not (tmp_path / "trace").exists()
    with allow_code([network]):
        assert load_model(f"{network}:build", {"width": 7}, None, seed=0).in_features == 7
        for name in ("Net", "annotated", "unknown"):
            assert load_model(f"{network}:{name}", {"width": 5}, None, seed=0).in_features == 5
    with pytest.raises(OptionError, match="--allow-code"):
        load_model(f"{network}:build", {}, None, seed=0)


@pytest.mark.parametrize("name", ["os:system", "os:popen", "subprocess:run", "builtins:exec", "posix:system", "runpy:run_path"])
def test_the_standard_library_is_refused_even_where_it_is_allowed(name):
    with allow_code([name.partition(":")[0]]), pytest.raises(OptionError, match="standard library, which holds no model"):
        find_function(name)


@pytest.mark.parametrize(
    "name",
    ["torch.hub:load", "torch:load", "torch.jit:load", "torch.utils.cpp_extension:load_inline", "numpy.testing:runstring", "pip:main"],
)
def test_functions_that_take_code_by_its_name_are_refused_even_where_their_module_is_allowed(name):
    with allow_code([name.partition(":")[0]]), pytest.raises(OptionError, match=r"which builds no model|is a function of"):
        find_function(name)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("system", "expected 'strangers_network:system' to be a class of torch.nn.Module or a Python function .*, got builtin_function"),
        ("popen", "is a function of 'os'"),
        ("load", "is a function of 'torch.hub'"),
        ("Path", "got type"),
        ("half_built", "got partial"),
        ("count", "declared to return int"),
        ("nothing", "declared to return NoneType"),
        ("missing", "has no 'missing'"),
        ("Net.forward", "expected a registered name or module:function"),
    ],
)
def test_only_classes_and_functions_of_the_module_itself_are_taken(function, message, network):
    with allow_code([network]), pytest.raises(OptionError, match=message):
        find_function(f"{network}:{function}")


def test_what_a_function_returns_must_be_a_model(network):
    with allow_code([network]), pytest.raises(OptionError, match=r"must return a torch\.nn\.Module, got int"):
        load_model(f"{network}:command", {"text": "true"}, None, seed=0)


@pytest.mark.parametrize("name", [":build", "module:", "a b:build", "../network:build", "/tmp/network.py:build", "module:b;id", ".net:f"])
def test_names_that_are_no_names_are_refused(name):
    with allow_code([name.partition(":")[0]]), pytest.raises(OptionError, match="expected a registered name or module:function"):
        find_function(name)


def test_installed_modules_come_before_the_working_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "safetensors").mkdir()
    (tmp_path / "safetensors" / "__init__.py").write_text("")
    (tmp_path / "safetensors" / "shadow.py").write_text("def build(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    before = list(sys.path)
    with working_directory_last():
        assert sys.path[-1] == str(tmp_path)
        assert not {"", str(tmp_path)} & set(sys.path[:-1])
    assert sys.path == before
    with allow_code(["safetensors.shadow"]), pytest.raises(OptionError, match=r"No module named 'safetensors\.shadow'"):
        find_function("safetensors.shadow:build")


def test_the_file_is_announced_before_it_is_imported(network, tmp_path):
    heard = []

    def announce(sentence):
        assert not (tmp_path / "trace").exists()
        heard.append(sentence)

    with allow_code([network], announce):
        assert find_function(f"{network}:build")
    assert heard == [f"imports strangers_network from {tmp_path / 'strangers_network.py'}"]


def test_a_class_of_an_installed_package_is_found():
    with allow_code(["torch.nn"]):
        assert find_function("torch.nn:Linear") is nn.Linear
