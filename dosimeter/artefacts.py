"""Files and their fingerprints: atomic writes, tensor hashes and checkpoint files."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dosimeter.files import check_path, kind_of
from dosimeter.stopping import stop_if_requested, stop_requested

CHECKPOINT_FOLDER = "checkpoints"  # in a run's own folder
SECONDS_BETWEEN_CHECKPOINTS = 60.0  # by default
CONTENTS = "contents"  # the fact of a checkpoint that its tensors are held against
FINGERPRINT_DIGITS = 16  # hexadecimal: 64 bits


def fingerprint(*parts: str | Tensor, digits: int = FINGERPRINT_DIGITS) -> str:
    """A hash of text and of tensors to the last bit, in this order: the first hexadecimal digits of SHA-256.

    A tensor counts by its bytes alone. A caller for whom shapes or types matter passes them as text.
    """
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part.encode() if isinstance(part, str) else _bytes_of(part))
    return digest.hexdigest()[:digits]


@contextmanager
def atomic_write(path: Path, *, durable: bool = False) -> Iterator[Path]:
    """A temporary path to write to. It replaces `path` if the block succeeds; `path` is untouched if the block fails or is killed.

    With `durable` the file is on disk, and found under its name after a power cut, when the block ends.
    """
    check_path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    os.close(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))  # no link of this name is followed
    try:
        yield unfinished
        if durable:
            _flush(unfinished)
        os.replace(unfinished, path)
        if durable:
            _flush(path.parent)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _flush(path: Path) -> None:
    """Let the system write a file, or the names in a folder, to disk now."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def require_folder(path: Path) -> None:
    """Refuse what stands in the place of a folder that Dosimeter writes to."""
    check_path(path)
    if path.exists() and not path.is_dir():
        raise ValueError(f"{path}: expected a folder to write to, got {kind_of(path.stat().st_mode)}; choose another")


def refuse_link(path: Path) -> None:
    """Refuse a symbolic link in a place where Dosimeter writes: the file that it points to is not ours."""
    if path.is_symlink():
        raise ValueError(f"{path}: is a symbolic link, which Dosimeter does not write through; remove it or choose another folder")


def open_own_file(path: Path) -> int:
    """The descriptor of a plain file to read and write, made where there is none. Nothing is cut, and no link is followed."""
    refuse_link(path)
    if path.exists() and not path.is_file():
        raise ValueError(f"{path}: expected a plain file, got {kind_of(path.stat().st_mode)}")
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):  # put there since
        os.close(descriptor)
        raise ValueError(f"{path}: expected a plain file, got {kind_of(mode)}")
    return descriptor


def remove_file(path: Path) -> None:
    """Remove a file that `atomic_write` wrote, and what a killed write of it left unfinished."""
    for file in (path, *path.parent.glob(f".{path.name}.*")):
        file.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write a text file, completely or not at all."""
    with atomic_write(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_tensors(path: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None, *, durable: bool = False) -> None:
    """Write a safetensors file with `facts` in its header, completely or not at all."""
    with atomic_write(path, durable=durable) as unfinished:
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, unfinished, dict(facts or {}) or None)


def read_tensors(path: Path, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors and the facts of a safetensors file; a torn or foreign file is a ValueError."""
    try:
        with safe_open(path, framework="pt", device=str(device)) as file:
            # Cloned, since sums over tensors that lie unaligned, as in the file, differ in the last bit.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: truncated, damaged or not a safetensors file") from error


def fingerprint_of_tensors(tensors: Mapping[str, Tensor]) -> str:
    """A hash of tensors with their names, types and shapes."""
    names = sorted(tensors)
    return fingerprint(repr([(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in names]), *(tensors[n] for n in names))


@dataclass
class CheckpointFile:
    """The file in which a long computation saves its state at intervals, and from which it resumes."""

    path: Path
    every: float = SECONDS_BETWEEN_CHECKPOINTS
    key: str = ""  # hash of what the computation depends on, where the file's name lacks it
    _last_saved: float = field(default_factory=time.monotonic, init=False, repr=False)

    @property
    def due(self) -> bool:
        return stop_requested() or time.monotonic() - self._last_saved >= self.every

    def save(self, tensors: Mapping[str, Tensor], facts: Mapping[str, str] | None = None) -> None:
        """Write the state. If a signal has asked the run to stop, the run stops here."""
        marked = {**(facts or {}), CONTENTS: fingerprint_of_tensors(tensors)} | ({"key": self.key} if self.key else {})
        write_tensors(self.path, tensors, marked)
        self._last_saved = time.monotonic()
        stop_if_requested()

    def load(self, device: torch.device | str = "cpu") -> tuple[dict[str, Tensor], dict[str, str]] | None:
        """The state that an earlier run saved, or None. A torn or changed file, or a file with another key, is ignored."""
        if not self.path.is_file():
            return None
        try:
            tensors, facts = read_tensors(self.path, device)
        except ValueError:
            return None
        intact = facts.pop(CONTENTS, "") == fingerprint_of_tensors(tensors)
        return (tensors, facts) if intact and facts.get("key", "") == self.key else None

    def remove(self) -> None:
        remove_file(self.path)


@dataclass(frozen=True)
class _Checkpoints:
    folder: Path
    every: float  # seconds


_checkpoints: ContextVar[_Checkpoints | None] = ContextVar("checkpoints", default=None)


@contextmanager
def save_checkpoints(folder: str | Path | None, every: float | None = None) -> Iterator[None]:
    """Inside this block, long computations save checkpoints in `folder` and resume from them. None: no checkpoints."""
    if every is not None and not 0 <= every < math.inf:
        raise ValueError(f"checkpoint_every: expected seconds, 0 or more, got {every}")
    every = SECONDS_BETWEEN_CHECKPOINTS if every is None else every
    token = _checkpoints.set(None if folder is None else _Checkpoints(Path(folder), every))
    try:
        yield
    finally:
        _checkpoints.reset(token)


def saves_checkpoints() -> bool:
    """Whether the surrounding block wants checkpoints."""
    return _checkpoints.get() is not None


def checkpoint_file(name: str) -> CheckpointFile:
    """The checkpoint file of this name in the folder of the surrounding `save_checkpoints`."""
    checkpoints = _checkpoints.get()
    assert checkpoints is not None, "asked for a checkpoint outside of save_checkpoints"
    return CheckpointFile(checkpoints.folder / name, checkpoints.every)


def _bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().cpu().resolve_neg().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
