"""An audit that is killed, stopped or out of disk loses nothing, repeats nothing, and ends as if nothing had happened."""

import copy
import dataclasses
import multiprocessing
import os
import random
import re
import resource
import signal
import sys
import time
from pathlib import Path

import pytest

from dosimeter.artefacts import CHECKPOINT_FOLDER
from dosimeter.cli import main
from dosimeter.records import FILE_NAME, read_records

KILLS = 50
SIGNALS = (signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT)
WORDS = ["audit", "data.name=digits", "data.batch_size=2", 'labels=["idlg", "ilrg", "llg"]', "features=[]"]
WORDS += ['attacks=[{name="inverting_gradients", steps=60}, {name="dlg", steps=30}]', "--checkpoint-every", "0"]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def server():
    """Processes that have imported everything when they begin, so that the instants fall into the audit itself."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dosimeter.cli", "dosimeter.runs.audit", "dosimeter.report.page", "dosimeter.data.load"])
    return context


@pytest.fixture(scope="module")
def whole(server, tmp_path_factory):
    """The records of an audit that nothing stopped, and its seconds."""
    for name in ("first", "second"):  # the first one waits for the imports
        folder, began = tmp_path_factory.mktemp(name), time.monotonic()
        process = start(server, folder)
        process.join()
        assert process.exitcode == 0
        seconds = time.monotonic() - began
    return comparable(folder), seconds


def start(server, folder, largest_file=None):
    process = server.Process(target=audit, args=(str(folder), largest_file))
    process.start()
    return process


def audit(folder, largest_file):
    quiet = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(quiet, stream)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.exit(main([*WORDS, "--out", folder]))


def comparable(folder):
    """The records by their key, without what differs from run to run: the times, and the step at which an attack resumed."""
    found = {}
    for record in read_records(folder):
        details = copy.deepcopy(record.details)
        details["message"] = "; ".join(part for part in details.get("message", "").split("; ") if not re.match("resumed at step", part))
        details.get("ceiling", {}).pop("seconds", None)
        found[record.key] = dataclasses.replace(record, seconds=0.0, details=details)
    return found


def whole_lines(folder):
    path = Path(folder) / FILE_NAME
    return path.read_bytes().split(b"\n")[:-1] if path.exists() else []


def wait_for_checkpoint(folder, process):
    """Until an attack of this process has saved itself, so that the next kill falls into an attack."""
    began = time.time()
    while process.is_alive() and not any(written_since(began, file) for file in (folder / CHECKPOINT_FOLDER).glob("*.safetensors")):
        time.sleep(0.005)


def written_since(began, file):
    try:
        return file.stat().st_mtime > began
    except FileNotFoundError:  # the attack has ended
        return False


def test_kills_at_many_instants(server, whole, tmp_path):
    """Every other kill falls into an attack, the others fall anywhere."""
    expected, seconds = whole
    chance, kills, audits, resumed = random.Random(0), 0, 0, 0
    while kills < KILLS:
        folder, before = tmp_path / str(audits), []
        while True:
            process = start(server, folder)
            if kills % 2:
                wait_for_checkpoint(folder, process)
                process.join(chance.uniform(0.0, 0.1))
            else:
                process.join(chance.uniform(0.0, seconds))
            if process.exitcode is None and kills < KILLS:
                number = SIGNALS[kills % len(SIGNALS)]
                os.kill(process.pid, number)
                process.join(30)
                before_the_command = {1} if number == signal.SIGINT else set()  # multiprocessing ends so
                assert process.exitcode in {-number, 128 + number, 0} | before_the_command
                kills += 1
            else:
                process.join()
                assert process.exitcode == 0
            after = whole_lines(folder)
            assert after[: len(before)] == before, "a record was lost or changed"
            if process.exitcode == 0:
                break
            before = after
        assert len(after) == len(expected), "a record was made twice"
        assert comparable(folder) == expected
        resumed += sum("resumed at step" in record.details.get("message", "") for record in read_records(folder))
        assert list((folder / CHECKPOINT_FOLDER).iterdir()) == []
        audits += 1
    assert resumed > 0


@pytest.mark.parametrize("largest_file", [0, 1, 2000, 3000, 20_000, 100_000])
def test_a_full_disk(server, whole, largest_file, tmp_path):
    """A limit on the size of files stands for the full disk: a write ends in the middle with an error."""
    process = start(server, tmp_path, largest_file)
    process.join()
    assert process.exitcode in (0, 2)
    if (tmp_path / FILE_NAME).exists() and whole_lines(tmp_path):
        assert {key for key, record in comparable(tmp_path).items() if record.outcome != "crashed"} <= set(whole[0])
    again = start(server, tmp_path)
    again.join()
    assert again.exitcode == 0
    assert comparable(tmp_path) == whole[0]
