"""Captures on disk: whole or not at all, each under its own name, read strictly."""

import json
import os
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import dosimeter as dm
from dosimeter.captures.store import captures_in, read_model
from dosimeter.cli import main


def write(folder, **facts):
    state = {"w": torch.arange(6.0).reshape(2, 3), "steps": torch.tensor(4)}
    return dm.write_capture(folder, state, **{"kind": "weights", "before": {"w": torch.zeros(2, 3), "steps": torch.tensor(0)}} | facts)


def test_there_and_back(tmp_path):
    path = write(tmp_path, round=2, client="a/b ü", training=dm.FedAvg(steps=4))
    capture = dm.read_capture(path)
    assert (capture.round, capture.client, capture.kind, capture.training) == (2, "a/b ü", "weights", dm.FedAvg(steps=4))
    assert torch.equal(capture.update["w"], torch.arange(6.0).reshape(2, 3))
    assert torch.equal(read_model(path, capture)["w"], torch.zeros(2, 3))
    assert path.name.startswith("round-2-client-a_b_-")


def test_arrays_and_shared_tensors_are_written(tmp_path):
    shared = torch.ones(3)
    path = dm.write_capture(tmp_path, {"a": shared, "b": shared, "c": np.float32([1, 2])}, kind="difference")
    assert torch.equal(dm.read_capture(path).update["c"], torch.tensor([1.0, 2.0]))


def test_a_model_is_written_once(tmp_path):
    for client in "abc":
        write(tmp_path, round=0, client=client)
    assert len(list(tmp_path.glob("model-*"))) == 1
    assert len(captures_in(tmp_path)) == 3


def test_a_changed_model_beside_is_refused(tmp_path):
    path, other = write(tmp_path / "one"), write(tmp_path / "two", before={"w": torch.ones(2, 3)})
    next((tmp_path / "one").glob("model-*")).write_bytes(next((tmp_path / "two").glob("model-*")).read_bytes())
    with pytest.raises(ValueError, match="its content was changed"):
        read_model(path, dm.read_capture(path))
    next((tmp_path / "two").glob("model-*")).unlink()
    assert read_model(other, dm.read_capture(other)) is None


def test_two_clients_that_write_at_once_do_not_mix(tmp_path):
    def send(client: int) -> None:
        for number in range(20):
            dm.write_capture(tmp_path, {"w": torch.full((1000,), float(client))}, kind="gradient", round=number, client=str(client))

    threads = [threading.Thread(target=send, args=(client,)) for client in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    captures = [dm.read_capture(path) for path in captures_in(tmp_path)]
    assert len(captures) == 40
    assert all(bool((capture.update["w"] == float(capture.client)).all()) for capture in captures)


SERVER = """
import sys, torch, dosimeter as dm
for round in range(10_000):
    path = dm.write_capture(sys.argv[1], {"w": torch.full((20_000,), float(round))}, kind="gradient", round=round)
    print(path, flush=True)
"""


def test_killing_the_server_loses_no_written_capture(tmp_path):
    environment = os.environ | {"PYTHONPATH": str(Path(dm.__file__).parents[1])}
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment)
    said = [server.stdout.readline().strip() for _ in range(3)]
    time.sleep(0.05)
    server.send_signal(signal.SIGKILL)
    said += [line.strip() for line in server.stdout if line.endswith(f".safetensors{os.linesep}")]
    server.wait()
    assert len(said) >= 3
    assert {str(path) for path in captures_in(tmp_path)} >= set(said)
    for path in captures_in(tmp_path):  # one more may be whole, none is torn
        assert bool((dm.read_capture(path).update["w"] == float(dm.read_capture(path).round)).all())


def headed(header: object, data: bytes = b"1234") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


FACTS = {"dosimeter_capture": '{"format": 1, "kind": "gradient"}'}
ENTRY = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "header is cut"),
        (struct.pack("<Q", 2**62) + b"{}", "header is cut or too long"),
        (headed([]), "not a safetensors file"),
        (headed({"w": ENTRY}), "without the facts of a capture"),
        (headed({"__metadata__": FACTS}, b""), "holds no tensor"),
        (headed({"__metadata__": FACTS, "w": ENTRY | {"shape": [10**15]}}), "memory|add up"),
        (headed({"__metadata__": FACTS, "w": ENTRY | {"dtype": "F8_E4M3"}}), "expected a type out of BOOL"),
        (headed({"__metadata__": FACTS, "w": ENTRY | {"dtype": ["F32"]}}), "expected a type out of BOOL"),
        (headed({"__metadata__": FACTS, "w": ENTRY}, b"12345678"), "do not add up to its size"),
        (headed({"__metadata__": {"dosimeter_capture": '{"format": 9, "kind": "gradient"}'}, "w": ENTRY}), "install a newer one"),
    ],
)
def test_a_damaged_file_is_one_sentence_and_exit_code_2(content, sentence, tmp_path, capsys):
    path = tmp_path / "round-0-client-x-1.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=sentence):
        dm.read_capture(path)
    assert main(["capture", "show", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(path) in error


def test_a_pipe_is_not_waited_for(tmp_path, capsys):
    os.mkfifo(tmp_path / "capture.safetensors")
    assert main(["capture", "show", str(tmp_path / "capture.safetensors")]) == 2
    assert "got a pipe" in capsys.readouterr().err


def test_a_folder_is_shown(tmp_path, capsys):
    assert main(["capture", "show", str(tmp_path)]) == 2
    for client in ("a", "b"):
        write(tmp_path, round=1, client=client, batch_size=8)
    assert main(["capture", "show", str(tmp_path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert [(each["client"], each["batch_size"], each["model_is_beside"], each["numbers"]) for each in shown] == [
        ("a", 8, True, 7),
        ("b", 8, True, 7),
    ]
    assert main(["capture", "show", str(tmp_path)]) == 0
    assert "batch size: 8" in capsys.readouterr().out


def test_what_is_no_state_dict_is_refused_in_a_sentence(tmp_path):
    state = {"w": torch.zeros(2)}
    with pytest.raises(TypeError, match="update: expected tensors by name"):
        dm.write_capture(tmp_path, 3, kind="weights")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="before: expected tensors by name"):
        dm.write_capture(tmp_path, state, before=3, kind="weights")  # pyright: ignore[reportArgumentType]
    assert list(tmp_path.iterdir()) == []


def test_digits_of_other_scripts_in_names_are_sorted(tmp_path):
    for name in ("round-1\u00b21-client-a-1", "round-11-client-a-1", "round-2-client-a-1"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"")
    assert captures_in(tmp_path)[-1].name.startswith("round-11")
