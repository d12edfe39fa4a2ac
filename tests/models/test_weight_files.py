from __future__ import annotations

import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dosimeter.models.loading import load_weights
from dosimeter.models.weight_files import read_tensors


def test_an_archive_that_unpacks_to_far_more_than_its_size_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive, archive.open("weights/data/0", "w", force_zip64=True) as member:
        for _ in range(300):
            member.write(bytes(10**6))
    with pytest.raises(ValueError, match=f"^weights: {path}: .* bytes that unpack to 300 MB are refused"):
        read_tensors(path)


def test_a_pickle_without_end_is_refused(tmp_path: Path) -> None:
    endless = b"\x80\x02}K\x01\x85q\x00" + b"h\x00\x86q\x00" * 40 + b"K\x01s."
    for name in ("weights.pt", "weights.th"):
        path = tmp_path / name
        if name.endswith(".pt"):
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("weights/data.pkl", endless)
        else:
            path.write_bytes(endless)
        with pytest.raises(ValueError, match=f"^weights: {path} is refused, it repeats tuples"):
            read_tensors(path)


def test_a_tar_is_refused_since_torch_would_unpack_it_to_disk(tmp_path: Path) -> None:
    path = tmp_path / "weights.pth"
    with tarfile.open(path, "w") as archive:
        archive.addfile(tarfile.TarInfo("storages"), io.BytesIO())
    with pytest.raises(ValueError, match="is a tar archive"):
        read_tensors(path)


def test_files_from_before_torch_1_6_cut_anywhere(tmp_path: Path) -> None:
    path = tmp_path / "weights.th"
    torch.save(nn.Linear(3, 2).state_dict(), path, _use_new_zipfile_serialization=False)
    assert read_tensors(path)["weight"].shape == (2, 3)
    whole = path.read_bytes()
    for length in range(0, len(whole), 7):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=f"^weights: {path} (is truncated|holds more than tensors)"):
            read_tensors(path)


@pytest.mark.parametrize("kind", [torch.complex64, torch.int64, torch.int8])
def test_numbers_of_another_kind_are_refused(tmp_path: Path, kind: torch.dtype) -> None:
    model = nn.Linear(3, 2)
    path = tmp_path / "weights.safetensors"
    save_file({name: tensor.to(kind) for name, tensor in model.state_dict().items()}, path)
    with pytest.raises(ValueError, match=f"has {kind} where the model has torch.float32 in (weight|bias), "):
        load_weights(model, path)


def test_half_precision_is_welcome(tmp_path: Path) -> None:
    model, path = nn.Linear(3, 2), tmp_path / "weights.safetensors"
    halves = {name: tensor.half() for name, tensor in model.state_dict().items()}
    save_file(halves, path)
    load_weights(model, path)
    assert torch.equal(model.weight, halves["weight"].float())


def test_a_plain_pickle_runs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "weights.pt"
    path.write_bytes(pickle.dumps(print))
    with pytest.raises(ValueError, match=r"could run code when read|is truncated, damaged"):
        read_tensors(path)


def test_an_archive_whose_names_are_no_text_is_refused(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save(nn.Linear(3, 2).state_dict(), path)
    content = path.read_bytes()
    place = content.rindex(b"PK\x01\x02")  # the last entry of the directory
    damaged = bytearray(content)
    damaged[place + 9] |= 0x08  # its name is said to be UTF-8
    damaged[place + 46] = 0xFF
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="is truncated, damaged or not a torch file"):
        read_tensors(path)
