"""Signals: what stops at once, what saves a checkpoint first, and for how long it may."""

# ruff: noqa: PT012  (what stands before the signal is what is tested)

import signal
import threading
import time

import pytest
import torch

from dosimeter import stopping
from dosimeter.artefacts import CheckpointFile
from dosimeter.records import read_records, write_record
from dosimeter.stopping import SIGNALS, Stopped, saving_before_stop, stop_requested, stopping_on_signals
from dosimeter.types import Record


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_stops_at_once_where_nothing_is_to_be_saved(number):
    before = [signal.getsignal(one) for one in SIGNALS]
    with pytest.raises(Stopped) as caught, stopping_on_signals():
        signal.raise_signal(number)
    assert caught.value.number == number
    assert [signal.getsignal(one) for one in SIGNALS] == before
    assert not stop_requested()


def test_a_signal_waits_for_the_checkpoint_and_no_longer(tmp_path):
    checkpoint = CheckpointFile(tmp_path / "run.safetensors", every=1e9)
    with pytest.raises(Stopped), stopping_on_signals(), saving_before_stop():
        assert not checkpoint.due
        signal.raise_signal(signal.SIGTERM)
        assert checkpoint.due
        checkpoint.save({"step": torch.tensor(3)})
        pytest.fail("the run went on")
    found = checkpoint.load()
    assert found is not None
    assert int(found[0]["step"]) == 3
    assert not checkpoint.due


def test_a_signal_waits_for_the_record(tmp_path):
    plain = {name: {} for name in ("config", "threat_model", "metrics", "nulls", "versions")}
    words = dict.fromkeys(("key", "surface", "method", "verdict", "reason"), "x")
    record = Record(**plain, **words, outcome="completed", seed=0, warnings=[], seconds=0.0)  # pyright: ignore[reportArgumentType]
    with pytest.raises(Stopped), stopping_on_signals():
        with saving_before_stop():
            signal.raise_signal(signal.SIGTERM)
        write_record(tmp_path, record)
    assert len(read_records(tmp_path)) == 1


def test_a_second_signal_does_not_wait():
    with pytest.raises(Stopped) as caught, stopping_on_signals(), saving_before_stop():
        signal.raise_signal(signal.SIGTERM)
        signal.raise_signal(signal.SIGINT)
    assert caught.value.number == signal.SIGTERM


def test_a_computation_that_saves_nothing_has_its_time(monkeypatch):
    monkeypatch.setattr(stopping, "GRACE", 0.05)
    with pytest.raises(Stopped), stopping_on_signals(), saving_before_stop():
        signal.raise_signal(signal.SIGTERM)
        time.sleep(5)


def test_the_time_of_a_computation_that_ended_is_not_up_later(monkeypatch):
    monkeypatch.setattr(stopping, "GRACE", 0.05)
    with stopping_on_signals(), saving_before_stop():
        signal.raise_signal(signal.SIGTERM)
    time.sleep(0.1)
    assert not stop_requested()


def test_other_threads_have_no_signals():
    caught = []

    def work():
        with stopping_on_signals():
            caught.append(signal.getsignal(signal.SIGTERM))

    before = signal.getsignal(signal.SIGTERM)
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert caught == [before]
