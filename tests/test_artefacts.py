"""Files that are whole or absent, hashes that keep their values, checkpoints that a killed computation resumes from."""

import hashlib
from pathlib import Path

import pytest
import torch

from dosimeter.artefacts import (
    CheckpointFile,
    atomic_write,
    checkpoint_file,
    fingerprint,
    read_tensors,
    save_checkpoints,
    saves_checkpoints,
    write_tensors,
    write_text,
)


def test_a_fingerprint_is_the_hash_of_the_bytes_in_order() -> None:
    tensor = torch.arange(6, dtype=torch.float32).reshape(2, 3)
    expected = hashlib.sha256(b"weights" + tensor.numpy().tobytes()).hexdigest()[:16]
    assert fingerprint("weights", tensor) == expected
    assert fingerprint(tensor, "weights") != expected
    assert fingerprint("weights", tensor.flatten()) == expected  # a shape counts only where the caller passes it


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.ones(2, dtype=torch.bfloat16),
        torch.zeros(0),
        torch.rand(3, 2).T.requires_grad_(),
    ],
)
def test_a_fingerprint_takes_every_tensor_of_a_model(tensor: torch.Tensor) -> None:
    assert fingerprint(tensor) == fingerprint(tensor.detach().clone())


def test_a_fingerprint_reads_a_transposed_tensor_row_by_row() -> None:
    tensor = torch.rand(3, 2)
    assert fingerprint(tensor.T) == fingerprint(tensor.T.contiguous()) != fingerprint(tensor)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "page.html"
    write_text(path, "first")
    write_text(path, "second")
    assert path.read_text() == "second"
    assert list(path.parent.iterdir()) == [path]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    path.write_text("old")

    def write_half() -> None:
        with atomic_write(path) as unfinished:
            unfinished.write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_tensors_come_back_to_the_last_bit(tmp_path: Path) -> None:
    tensors = {"a": torch.rand(3, 4).T, "b": torch.tensor(7), "c": torch.tensor([True])}
    write_tensors(tmp_path / "file.safetensors", tensors, {"epoch": "3"})
    found, facts = read_tensors(tmp_path / "file.safetensors")
    assert facts == {"epoch": "3"}
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())


def test_a_torn_file_is_said(tmp_path: Path) -> None:
    (tmp_path / "torn").write_bytes(b"torn")
    with pytest.raises(ValueError, match="not a safetensors file"):
        read_tensors(tmp_path / "torn")


def test_a_checkpoint_is_loaded_under_its_own_key_only(tmp_path: Path) -> None:
    path = tmp_path / "run.safetensors"
    CheckpointFile(path, key="one").save({"a": torch.tensor(1.5)}, {"epoch": "2"})
    found = CheckpointFile(path, key="one").load()
    assert found is not None
    assert (float(found[0]["a"]), found[1]["epoch"]) == (1.5, "2")
    assert CheckpointFile(path, key="two").load() is None
    assert CheckpointFile(path).load() is None
    path.write_bytes(b"torn")
    assert CheckpointFile(path, key="one").load() is None
    (tmp_path / ".run.safetensors.0123").write_bytes(b"half, by a write that was killed")
    CheckpointFile(path).remove()
    assert list(tmp_path.iterdir()) == []
    assert CheckpointFile(path, key="one").load() is None


def test_a_checkpoint_is_due_after_its_time(tmp_path: Path) -> None:
    always, never = CheckpointFile(tmp_path / "a", every=0.0), CheckpointFile(tmp_path / "b", every=1e9)
    assert always.due
    assert not never.due


def test_checkpoints_are_saved_inside_the_block_only(tmp_path: Path) -> None:
    assert not saves_checkpoints()
    with save_checkpoints(tmp_path, every=5):
        assert checkpoint_file("name").path == tmp_path / "name"
        assert checkpoint_file("name").every == 5
        with save_checkpoints(None):
            assert not saves_checkpoints()
    assert not saves_checkpoints()
    with pytest.raises(ValueError, match="checkpoint_every"), save_checkpoints(tmp_path, every=-1):
        pass


def test_a_checkpoint_whose_bits_changed_is_ignored(tmp_path):
    path = tmp_path / "state.safetensors"
    CheckpointFile(path).save({"a": torch.arange(4.0)}, {"epoch": "2"})
    assert CheckpointFile(path).load() is not None
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    assert CheckpointFile(path).load() is None
    write_tensors(path, {"a": torch.arange(4.0)}, {"epoch": "2"})  # nothing says what it should hold
    assert CheckpointFile(path).load() is None


def test_a_path_that_no_system_call_takes_is_refused(tmp_path):
    for place in ("a\0b", "a\0b/c"):
        with pytest.raises(ValueError, match="which has a zero byte"), atomic_write(tmp_path / place):
            pass
