"""Odd files, words and calls that once ended in a traceback, a hang or gigabytes: each ends in a sentence or in an answer."""

import bz2
import gzip
import io
import json
import math
import resource
import struct
import tarfile
import time
import zipfile
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.config import read_toml
from dosimeter.data.load import load_images
from dosimeter.files import gunzip
from dosimeter.models.weight_files import read_tensors

QUICK = ("data=digits", "data.batch_size=2", "data.auxiliary=4", "labels=idlg")


@pytest.fixture(autouse=True)
def bounded():
    """What takes more than 4 GB beyond this process fails."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")) * 1024
    resource.setrlimit(resource.RLIMIT_AS, (held + 4 * 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def said(words, capsys) -> str:
    """The one sentence with which a command refuses, exit code 2."""
    assert main(list(words)) == 2
    text = capsys.readouterr().err.strip()
    assert "Traceback" not in text
    assert len(text) < 1000
    return " ".join(text.split())


def npy_header(shape) -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header += b" " * (63 - (10 + len(header)) % 64) + b"\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header


@pytest.mark.parametrize("members", [(".",), ("",), (".", "images.npy"), ("..", "../x.npy")])
def test_members_of_odd_names(tmp_path, capsys, members):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        for name in members:
            archive.writestr(zipfile.ZipInfo(name), b"x")
    assert "data.npz" in said(["run", *QUICK, f"data={path}"], capsys)
    weights = tmp_path / "weights.pt"
    weights.write_bytes(path.read_bytes())
    with pytest.raises(ValueError, match=r"weights\.pt"):
        read_tensors(weights)


def test_an_encrypted_archive(tmp_path, capsys):
    path = tmp_path / "data.npz"
    np.savez(path, images=np.zeros((4, 8, 8), np.uint8), labels=np.arange(4))
    content = bytearray(path.read_bytes())
    for mark, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        at = content.find(mark)
        while at >= 0:
            content[at + offset] |= 1
            at = content.find(mark, at + 4)
    path.write_bytes(content)
    assert "data.npz" in said(["run", *QUICK, f"data={path}"], capsys)


def test_headers_that_promise_64_tebibytes(tmp_path, capsys):
    path = tmp_path / "data.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", npy_header((2**26, 2**20)) + b"1234")
        archive.writestr("labels.npy", npy_header((2**26,)))
    assert "data.npz" in said(["run", *QUICK, f"data={path}"], capsys)
    weights = tmp_path / "weights.safetensors"
    header = json.dumps({"w": {"dtype": "U8", "shape": [2**46], "data_offsets": [0, 2**46]}}).encode()
    weights.write_bytes(struct.pack("<Q", len(header)) + header + b"1234")
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        read_tensors(weights)
    weights.write_bytes(struct.pack("<Q", 2**46) + header)
    with pytest.raises(ValueError, match=r"weights\.safetensors"):
        read_tensors(weights)


@pytest.mark.parametrize(
    ("word", "sentence"),
    [
        ("device=hpu", "device"),
        ("device=cuda:99", "device"),
        ("data.size=1000000000", "1000000000 pixels a side"),
        ("data.normalization.mean=[1.0, 2.0]", "normalization"),
        ("data.normalization.std=[0.0]", "std"),
        ("data.name=\x00", "zero byte"),
        ("model.weights=a\x00b", "zero byte"),
    ],
)
def test_odd_words(word, sentence, capsys):
    assert sentence in said(["run", *QUICK, word], capsys)


NUL = (
    ["run", *QUICK, "--out", "a\x00b"],
    ["report", "a\x00b"],
    ["capture", "show", "\x00"],
    ["inspect", "\x00.toml"],
    ["reproduce", "\x00"],
)


@pytest.mark.parametrize("words", NUL)
def test_paths_with_a_nul(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said(words, capsys)
    assert list(tmp_path.iterdir()) == []


def exposure_of(inputs, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 16), nn.ReLU(), nn.Linear(16, 8)).eval()
    return model, dm.observe(model, dm.Batch(inputs, torch.arange(len(inputs)) % 8), **options)


@pytest.mark.parametrize("scale", [1e15, 1e25, 1e30, 3e37])
@pytest.mark.parametrize("recover", [dm.recover_labels, dm.recover_features])
def test_huge_finite_inputs(scale, recover):
    inputs = scale * torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(0))
    _, exposure = exposure_of(inputs)
    found = recover(exposure, "subspace")
    assert isinstance(found.outcome, dm.Outcome)


def test_an_update_in_half_precision_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 8
    model, exposure = exposure_of(images[:2], auxiliary=dm.Batch(images[4:], labels[4:]))
    update = {name: change.half() for name, change in exposure.update.items()}
    received = dm.receive(model, update, kind="gradient", input_shape=(1, 8, 8), batch_size=2, auxiliary=dm.Batch(images[4:], labels[4:]))
    found = dm.reconstruct(received, "rgla", features="subspace", width=4, epochs=1)
    assert found.inputs.shape == (2, 1, 8, 8)
    assert bool(found.inputs.isfinite().all())


def test_receive_checks_what_is_beside_the_update():
    model, exposure = exposure_of(torch.rand(2, 1, 4, 4))
    given = {"kind": "gradient", "input_shape": (1, 4, 4)}
    with pytest.raises((TypeError, ValueError), match="auxiliary: expected"):
        dm.receive(model, exposure.update, auxiliary=3, **given)
    with pytest.raises(ValueError, match="std"):
        dm.receive(model, exposure.update, normalization=dm.Normalization(std=(0.0,)), **given)


def test_unknown_labels_among_known_ones_are_said():
    _, exposure = exposure_of(torch.rand(3, 1, 4, 4, generator=torch.Generator().manual_seed(1)))
    found = dm.recover_features(exposure, "subspace", labels=torch.tensor([0, -1, 2]))
    assert "unknown" in found.message or math.isclose(float(found.certified.double().mean()), 1.0)
    with pytest.raises(ValueError, match="labels: expected"):
        dm.recover_features(exposure, "subspace", labels=torch.tensor([0, -2, 2]))


def test_a_gzip_within_its_bounds_is_all_that_is_unpacked(tmp_path, capsys):
    import gzip

    path = tmp_path / "train-images-idx3-ubyte.gz"
    packed = io.BytesIO()
    with gzip.open(packed, "w", compresslevel=9) as stream:
        for _ in range(64):
            stream.write(bytes(2**24))
    path.write_bytes(packed.getvalue())
    assert "images" in said(["run", *QUICK, f"data={path}"], capsys)


class Own(nn.Module):
    """A classifier of 48 numbers that a case changes."""

    def __init__(self, change=None):
        super().__init__()
        self.net, self.change = nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 5)), change

    def forward(self, inputs):
        logits = self.net(inputs)
        return logits if self.change is None else self.change(logits)


class Uncopied(Own):
    def __deepcopy__(self, memo):
        raise KeyError


def with_sparse_weight() -> nn.Module:
    model = Own()
    model.net[1].weight = nn.Parameter(model.net[1].weight.detach().to_sparse())
    return model


def with_failing_hook() -> nn.Module:
    model = Own()
    model.net[3].register_full_backward_hook(lambda *_: 1 / 0)
    return model


def silent_failure(_):
    raise RuntimeError


@pytest.mark.parametrize("inspects", [True, False])
@pytest.mark.parametrize(("build", "words"), [(Uncopied, "cannot be copied: KeyError"), (with_sparse_weight, "sparse|cannot be copied")])
def test_a_model_that_cannot_be_copied_is_refused(build, words, inspects):
    batch = dm.Batch(torch.rand(4, 3, 4, 4), torch.arange(4))
    with pytest.raises(ValueError, match=words):
        dm.inspect(build(), batch=batch) if inspects else dm.observe(build(), batch)
    with pytest.raises(ValueError, match="cannot be copied"):
        dm.attack("gradfilt", targets=(3,)).tamper(build())


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (with_failing_hook(), "its own code failed .ZeroDivisionError"),
        (Own(silent_failure), "RuntimeError"),
        (Own(lambda logits: logits[:, None]), "cannot be trained on this batch"),
    ],
)
def test_a_model_that_fails_in_training_is_refused(model, words):
    batch = dm.Batch(torch.rand(4, 3, 4, 4), torch.arange(4))
    for call in (dm.observe, dm.audit):
        with pytest.raises(ValueError, match=words):
            call(model, batch)


def test_a_parametrized_layer_is_no_inserted_one():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Own()
        nn.utils.parametrizations.weight_norm(model.net[1])
        assert not dm.inspect(model, batch=dm.Batch(torch.rand(4, 3, 4, 4), torch.arange(4))).suspicious


@pytest.mark.parametrize(
    "text", ["a." * 10**5 + "b = 1", '"a b".' * 10**4 + "b = 1", "a = {" + "b." * 10**5 + "c = 1}", "[" + "a." * 10**5 + "b]"]
)
def test_keys_of_many_parts_are_refused_before_the_parser_sees_them(tmp_path, capsys, text):
    """Python's parser takes 38 GB for the first one."""
    (tmp_path / "audit.toml").write_text(text)
    assert "a key has more than 32 parts" in said(["audit", str(tmp_path / "audit.toml")], capsys)


def test_dots_in_texts_comments_and_numbers_make_no_long_key(tmp_path):
    (tmp_path / "a.toml").write_text(f"a = '{'x.' * 99}' # {'y.' * 99}\nb = [{'0.5,' * 99}]\nc = {chr(34) * 3}{'x.' * 99}{chr(34) * 3}\n")
    assert read_toml(tmp_path / "a.toml")["b"] == [0.5] * 99


def tiff(side: int, tile: int) -> bytes:
    """A gray picture of `side` pixels in one tile of `tile` pixels."""
    packed = zlib.compress(bytes(tile * tile), 1)
    tags = [(256, side), (257, side), (258, 8), (259, 8), (262, 1), (277, 1), (322, tile), (323, tile), (324, 134), (325, len(packed))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    return b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + packed


def test_a_tile_far_larger_than_its_picture_is_refused(tmp_path):
    (tmp_path / "a.tif").write_bytes(tiff(16, 16))
    assert load_images(tmp_path).images.shape == (1, 1, 16, 16)
    (tmp_path / "a.tif").write_bytes(tiff(16, 8192))
    with pytest.raises(ValueError, match="8192×8192 pixels are more than"):
        load_images(tmp_path)


def test_a_manifest_that_names_one_picture_many_times_unpacks_no_more_than_its_bytes_allow(tmp_path):
    Image.new("L", (1000, 1000)).save(tmp_path / "a.png")
    entries = [{"file": "a.png", "label": str(number)} for number in range(10**5)]
    (tmp_path / "manifest.json").write_text(json.dumps(entries))
    with pytest.raises(ValueError, match=r"unpack to .* are refused"):
        load_images(tmp_path)
    with pytest.raises(ValueError, match="100000 images of 1000 pixels needs about"):
        load_images(tmp_path, size=1000)


def test_class_names_without_number_are_refused(tmp_path):
    names = np.full(10**6, "a")
    np.savez_compressed(tmp_path / "a.npz", images=np.zeros((1, 4, 4), np.uint8), labels=np.zeros(1, int), class_names=names)
    with pytest.raises(ValueError, match="class_names: expected class ids up to"):
        load_images(tmp_path / "a.npz")


def test_a_manifest_of_many_packed_megabytes_is_refused(tmp_path):
    with zipfile.ZipFile(tmp_path / "set.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a/1.png", b"x")
        archive.writestr("manifest.json", b"[" + b"{}," * 6 * 10**6 + b"{}]")
    with pytest.raises(ValueError, match=r"manifest.json: expected at most 16777216 bytes"):
        load_images(tmp_path / "set.zip")


def peak_beyond(call) -> int:
    """The bytes that a call takes beyond what the process holds."""

    def field(name: str) -> int:
        return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)) * 1024

    before = field("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    with pytest.raises(ValueError, match=r"a\.(npz|pt)"):
        call()
    return field("VmHWM") - before


@pytest.mark.parametrize("packing", [zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
def test_a_packing_that_heeds_no_size_is_refused_unpacked(tmp_path, packing):
    """zipfile unpacks all that it has read of such a member, whatever size the archive states and the reader asks for."""
    content, size = io.BytesIO(), 10**8
    with zipfile.ZipFile(content, "w", packing) as archive:
        archive.writestr("images.npy", bytes(size))
    data = content.getvalue().replace(struct.pack("<I", size), struct.pack("<I", 1000))
    (tmp_path / "a.npz").write_bytes(data)
    assert peak_beyond(lambda: load_images(tmp_path / "a.npz")) < 10**7
    (tmp_path / "a.pt").write_bytes(data.replace(b"images.npy", b"x/data.pkl"))
    assert peak_beyond(lambda: read_tensors(tmp_path / "a.pt")) < 10**7


def test_a_packed_tar_is_not_unpacked_for_its_first_name(tmp_path):
    name = tarfile.TarInfo("././@LongLink")
    name.type, name.size = b"L", 4 * 10**8
    (tmp_path / "a.pt").write_bytes(bz2.compress(name.tobuf(format=tarfile.GNU_FORMAT) + bytes(name.size)))
    assert peak_beyond(lambda: read_tensors(tmp_path / "a.pt")) < 10**8


def test_many_empty_gzip_members_take_no_time(tmp_path):
    """Each member once copied all that followed it."""
    began = time.process_time()
    content = gzip.compress(b"") * 10**5 + gzip.compress(b"x")
    assert gunzip(content + bytes(9), "a.gz") == b"x"
    with pytest.raises((OSError, EOFError)):
        gunzip(content + b"x", "a.gz")
    assert time.process_time() - began < 15
