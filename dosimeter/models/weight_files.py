"""Weights files that a stranger may have written: nothing in them is run, and nothing is unpacked that is out of proportion."""

from __future__ import annotations

import io
import pickle
import tarfile
import warnings
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file

from dosimeter.files import check_path, check_unpacked, open_regular, size_of
from dosimeter.pickles import EndlessPickleError, scan_pickle

TORCH_SUFFIXES = (".pt", ".pth", ".th")
SAFETENSORS_SUFFIX = ".safetensors"
PICKLE_MEMBER = "data.pkl"  # of a torch archive
BOUNDED_PACKINGS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # what torch reads; zipfile unpacks others as far as they go
LEGACY_PICKLES = 5  # one after another in files from before torch 1.6


def read_tensors(path: Path) -> Any:
    """What a weights file holds, on the CPU; nothing in the file is ever run."""
    check_path(path)
    if not path.is_file():
        if path.exists() and not path.is_dir():
            open_regular(path).close()  # says that a pipe or a device is none
        raise FileNotFoundError(f"weights: no file {path}")
    if path.suffix != SAFETENSORS_SUFFIX and path.suffix not in TORCH_SUFFIXES:
        raise ValueError(f"weights: expected a file ending in {SAFETENSORS_SUFFIX}, {', '.join(TORCH_SUFFIXES)}, got {path}")
    kind = "safetensors" if path.suffix == SAFETENSORS_SUFFIX else "torch"
    if kind == "torch":
        _check_torch_file(path)
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's hints on pickle protocols and TorchScript: refused below anyway
            return load_file(path) if kind == "safetensors" else torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes can fail in any way, deep inside torch
        if isinstance(error, pickle.UnpicklingError) or "TorchScript" in str(error):
            remedy = "save model.state_dict() or a .safetensors file instead"
            raise ValueError(f"weights: {path} holds more than tensors and could run code when read, so it is refused; {remedy}") from error
        raise ValueError(f"weights: {path} is truncated, damaged or not a {kind} file") from error


def _check_torch_file(path: Path) -> None:
    """Refuse, before torch sees it, a file that unpacks to far more than its size, or that torch would unpack to disk."""
    with open_regular(path) as file:
        try:
            if zipfile.is_zipfile(file):
                _check_archive(file, path)
            elif _is_tar(path):
                raise ValueError(f"weights: {path} is a tar archive, as torch wrote before version 0.4; save it again")
            else:
                file.seek(0)
                _scan_pickles(file)
        except EndlessPickleError as error:
            raise ValueError(f"weights: {path} is refused, {error}") from None
        except zipfile.BadZipFile as error:  # `is_zipfile` raises where an archive says that it spans disks
            raise ValueError(f"weights: {path} is truncated, damaged or not a torch file") from error


def _check_archive(file: IO[bytes], path: Path) -> None:
    try:
        archive = zipfile.ZipFile(file)
        if any(member.compress_type not in BOUNDED_PACKINGS for member in archive.infolist()):
            raise ValueError(f"weights: {path} is packed in a way that torch does not read")
        pickles = [archive.read(member) for member in _members(archive, path) if member.filename.endswith(PICKLE_MEMBER)]
    except (UnicodeDecodeError, zipfile.BadZipFile):
        raise ValueError(f"weights: {path} is truncated, damaged or not a torch file") from None
    except ValueError:
        raise
    except Exception:  # damaged: torch says so
        return
    for content in pickles:
        _scan_pickles(io.BytesIO(content), 1)


def _members(archive: zipfile.ZipFile, path: Path) -> list[zipfile.ZipInfo]:
    members = archive.infolist()
    check_unpacked(sum(member.file_size for member in members), size_of(path), f"weights: {path}")
    return members


def _scan_pickles(stream: IO[bytes], count: int = LEGACY_PICKLES) -> None:
    try:
        for _ in range(count):
            scan_pickle(stream)
    except EndlessPickleError:
        raise
    except Exception:  # damaged: torch says so
        return


def _is_tar(path: Path) -> bool:
    try:
        tarfile.open(path, "r:").close()  # without compression, as torch looks for it
    except Exception:  # damaged bytes can fail in any way
        return False
    return True
