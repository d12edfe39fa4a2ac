"""Memory: what is free, and what is refused."""

import pytest

from dosimeter import memory


def test_the_least_of_machine_container_and_process_is_free(monkeypatch):
    for name, free in (("_free_on_machine", 7), ("_free_in_container", 5), ("_free_for_process", 6)):
        monkeypatch.setattr(memory, name, lambda free=free: free)
    assert memory.free_memory() == 5
    monkeypatch.setattr(memory, "_free_for_process", lambda: -3)
    assert memory.free_memory() == 0


def test_a_container_counts_its_cached_files_as_free(tmp_path, monkeypatch):
    paths = tuple(tmp_path / name for name in ("limit", "use", "parts"))
    for path, text in zip(paths, ("1000", "900", "anon 600\nfile 300\n")):
        path.write_text(text)
    monkeypatch.setattr(memory, "CONTAINER_FILES", (paths,))
    assert memory._free_in_container() == 400
    paths[0].write_text("max")
    assert memory._free_in_container() == memory.UNKNOWN


def test_the_limit_of_a_run_bounds_what_a_method_may_take(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 10**15)
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "1000")
    assert 900e9 < memory.spare_memory() < 1000e9
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "0.001")
    assert memory.spare_memory() == 0
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "much")
    with pytest.raises(ValueError, match="DOSIMETER_MEMORY_GB: expected a number of GB, got 'much'"):
        memory.spare_memory()


def test_what_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "free_memory", lambda: 2 * 10**9)
    memory.require_memory(2e9, "it")
    with pytest.raises(ValueError, match=r"it needs about 3 GB of memory, 2 GB are free"):
        memory.require_memory(3e9, "it")
