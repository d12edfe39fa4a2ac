from __future__ import annotations

import os
import pickle
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dosimeter.models.loading import load_model, load_weights
from dosimeter.models.named_code import allow_code
from dosimeter.options import OptionError
from dosimeter.registry import MODELS

TINY = {"classes": 3, "channels": 1, "size": 8, "width": 2}

USER_MODULE = """
import torch
from torch import nn

def build(width=4):
    return nn.Sequential(nn.Flatten(), nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 3))

def number():
    return 7

def broken(width):
    raise ZeroDivisionError("no such width")

constant = 3
"""


@pytest.fixture
def tiny() -> nn.Module:
    return MODELS.build("small_cnn", **TINY)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name = f"network_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    with allow_code([name, "no_such_module_here", "half_written_network"]):
        yield name


def same(one: nn.Module, other: nn.Module) -> bool:
    first, second = one.state_dict(), other.state_dict()
    return list(first) == list(second) and all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["small_cnn", "lenet5", "resnet20", "mobilenet_v2"])
def test_the_seed_alone_decides_and_the_global_state_is_left(name: str) -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    first = load_model(name, {}, None, seed=5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(2)
    torch.rand(3)
    assert same(first, load_model(name, {}, None, seed=5))
    assert not same(first, load_model(name, {}, None, seed=6))


def test_weights_of_every_form_load(tiny: nn.Module, tmp_path: Path) -> None:
    state = tiny.state_dict()
    forms: dict[str, Any] = {
        "bare.pt": state,
        "under_state_dict.pth": {"epoch": 3, "state_dict": state},
        "under_model.th": {"optimizer": {"lr": 0.1}, "model": state},
        "parallel.pt": {"state_dict": {f"module.{key}": value for key, value in state.items()}},
        "compiled.pt": {f"_orig_mod.{key}": value for key, value in state.items()},
        "half.pt": {key: value.bfloat16() for key, value in state.items()},
    }
    for file, content in forms.items():
        torch.save(content, tmp_path / file)
        loaded = load_model("small_cnn", TINY, tmp_path / file, seed=99)
        if file == "half.pt":
            assert all(torch.equal(value.bfloat16(), state[key].bfloat16()) for key, value in loaded.state_dict().items())
            assert loaded.get_parameter("fc.weight").dtype == torch.float32
        else:
            assert same(loaded, tiny), file
    save_file(state, tmp_path / "plain.safetensors")
    assert same(load_model("small_cnn", TINY, tmp_path / "plain.safetensors", seed=99), tiny)
    assert same(load_model("small_cnn", TINY, str(tmp_path / "plain.safetensors"), seed=99), tiny)
    other = load_model("small_cnn", TINY, None, seed=98)
    load_weights(other, str(tmp_path / "plain.safetensors"))
    assert same(other, tiny)
    torch.save(state, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    assert same(load_model("small_cnn", TINY, tmp_path / "old.pt", seed=99), tiny)


def test_batch_counters_may_be_missing_but_statistics_may_not(tmp_path: Path) -> None:
    state = MODELS.build("resnet20").state_dict()
    torch.save({k: v for k, v in state.items() if not k.endswith("num_batches_tracked")}, tmp_path / "old.pt")
    loaded = load_model("resnet20", {}, tmp_path / "old.pt", seed=1)
    assert torch.equal(loaded.get_parameter("linear.weight"), state["linear.weight"])
    torch.save({k: v for k, v in state.items() if not k.endswith("running_mean")}, tmp_path / "older.pt")
    with pytest.raises(ValueError, match=r"19 missing \(bn1\.running_mean"):
        load_model("resnet20", {}, tmp_path / "older.pt", seed=1)


def test_what_does_not_fit_is_named(tiny: nn.Module, tmp_path: Path) -> None:
    state = tiny.state_dict()
    state["head.weight"] = state.pop("fc.weight")
    state["conv1.weight"] = torch.zeros(2, 3, 3, 3)
    before = {key: value.clone() for key, value in tiny.state_dict().items()}
    torch.save(state, tmp_path / "other.pt")
    with pytest.raises(ValueError) as caught:
        load_weights(tiny, tmp_path / "other.pt")
    assert str(caught.value) == (
        f"weights: {tmp_path / 'other.pt'} does not fit the model: 1 missing (fc.weight); 1 unexpected (head.weight); "
        "conv1.weight has shape (2, 3, 3, 3) where the model has (2, 1, 3, 3)"
    )
    assert all(torch.equal(before[key], value) for key, value in tiny.state_dict().items())


def test_weights_that_are_not_numbers_are_refused(tiny: nn.Module, tmp_path: Path) -> None:
    state = {key: value.clone() for key, value in tiny.state_dict().items()}
    state["conv2.bias"][0] = torch.nan
    torch.save(state, tmp_path / "nan.pt")
    with pytest.raises(ValueError, match=r"NaN or infinite entries in conv2\.bias"):
        load_weights(tiny, tmp_path / "nan.pt")


class Payload:
    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.trace,)


@pytest.mark.parametrize("form", ["pickle", "zip", "model"])
def test_a_file_that_could_run_code_is_refused_unread(form: str, tiny: nn.Module, tmp_path: Path) -> None:
    trace, path = tmp_path / "executed", tmp_path / "evil.pt"
    content = tiny if form == "model" else {"state_dict": Payload(str(trace))}
    if form == "pickle":
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    with pytest.raises(ValueError, match="could run code when read"):
        load_weights(tiny, path)
    assert not trace.exists()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.99])
def test_truncated_files_are_refused(suffix: str, kept: float, tiny: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / f"cut{suffix}"
    if suffix == ".pt":
        torch.save(tiny.state_dict(), path)
    else:
        save_file(tiny.state_dict(), path)
    content = path.read_bytes()
    path.write_bytes(content[: int(kept * len(content))])
    with pytest.raises(ValueError, match=rf"cut\{suffix} is truncated, damaged or not a (torch|safetensors) file$"):
        load_weights(tiny, path)


@pytest.mark.parametrize("content", [[1, 2], {}, {"epoch": 3, "weights": {}}, torch.zeros(3)])
def test_files_without_a_state_dict_are_refused(content: Any, tiny: nn.Module, tmp_path: Path) -> None:
    torch.save(content, tmp_path / "odd.pt")
    with pytest.raises(ValueError, match=r"odd\.pt holds no state dict"):
        load_weights(tiny, tmp_path / "odd.pt")


def test_missing_files_and_other_suffixes_are_refused(tiny: nn.Module, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"weights: no file .*absent\.pt"):
        load_weights(tiny, tmp_path / "absent.pt")
    with pytest.raises(FileNotFoundError, match=r"weights: no file"):
        load_weights(tiny, tmp_path)
    with pytest.raises(ValueError, match="/dev/zero: expected a file, got a device"):
        load_weights(tiny, Path("/dev/zero"))
    (tmp_path / "model.onnx").write_bytes(b"")
    with pytest.raises(ValueError, match=r"expected a file ending in .*model\.onnx"):
        load_weights(tiny, tmp_path / "model.onnx")


def test_a_function_of_the_users_own_is_called_with_the_options_and_the_seed(user_module: str) -> None:
    paths = list(sys.path)
    model = load_model(f"{user_module}:build", {"width": 9}, None, seed=4)
    assert model.get_parameter("1.weight").shape == (9, 16)
    assert same(model, load_model(f"{user_module}:build", {"width": 9}, None, seed=4))
    assert not same(model, load_model(f"{user_module}:build", {"width": 9}, None, seed=5))
    assert sys.path == paths


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("no_such_module_here:build", {}, r"^model: cannot import 'no_such_module_here' from .*: No module named"),
        ("{module}:buidl", {}, r"^model: the module '.*' has no 'buidl'; did you mean 'build'\?$"),
        ("{module}:constant", {}, r"^model: expected '.*:constant' to be a class of .* or a Python function .*, got int$"),
        ("{module}:number", {}, r"^model: .*:number must return a torch\.nn\.Module, got int$"),
        ("{module}:build", {"depth": 3}, r"^model: .*:build failed when called with \(depth=3\): .*unexpected keyword argument 'depth'$"),
        ("{module}:broken", {"width": 0}, r"^model: .*:broken failed when called with \(width=0\): no such width$"),
        (":build", {}, r"^model: expected a registered name or module:function, got ':build'$"),
        ("small_cnn", {"width": 0}, r"^model\.width: expected a positive int, got 0$"),
        ("smal_cnn", {}, r"^model: no model named 'smal_cnn'; did you mean 'small_cnn'\?$"),
    ],
)
def test_what_cannot_be_built_is_said_in_one_sentence(user_module: str, name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        load_model(name.format(module=user_module), options, None, seed=0)


def test_a_module_that_fails_while_it_is_imported_is_named(user_module: str, tmp_path: Path) -> None:
    (tmp_path / "half_written_network.py").write_text("def build(:\n")
    with pytest.raises(OptionError, match=r"cannot import .*invalid syntax"):
        load_model("half_written_network:build", {}, None, seed=0)


def test_an_archive_that_spans_disks_is_refused(tiny: nn.Module, tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    torch.save(tiny.state_dict(), path)
    content = bytearray(path.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    content[end:end] = b"PK\x06\x07" + struct.pack("<LQL", 1, 0, 3)  # the locator of a ZIP64 end on disk 1 of 3
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"weights\.pt is truncated, damaged or not a torch file"):
        load_weights(tiny, path)
