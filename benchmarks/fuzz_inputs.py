"""Files, command lines and calls for `fuzz.py`: honest ones, damaged ones, and ones made to do harm."""

from __future__ import annotations

import copy
import gzip
import importlib.util
import io
import json
import pickle
import random
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

EXTREMES = (0, 1, -1, 2**7, 2**8 - 1, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, -(2**63), 10**30)
ODD_VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 2**31, 2**63, 10**400, 1e308, -1e308, 1e-320, "", "x", "\ud800", "\x00", "a" * 5000,
    "<script>", "nan", "inf", [], {}, [[]], [None], ["x"], [{}], {"name": 3}, {"name": "x"}, {"": ""}, [1] * 50, [[1], "x", {}],
)  # fmt: skip
ODD_TOML = (
    "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "inf", "nan", "-0.0", "0xffffffffffffffffffff", "1e400", '""', "[]", "{}",
    "[[[[]]]]", "true", "-1", "9223372036854775807", "99999999999999999999999", '"\\u0000"', "{name = 1}", '["a", 1]', "[" * 500,
)  # fmt: skip


@dataclass(frozen=True)
class Reader:
    """One way into the package for a file: honest files to damage, files made to do harm, and what reads them."""

    name: str
    honest: Callable[[], list[dict[str, bytes]]]  # each: the files of one input, by name; the first is the one that is read
    read: Callable[[Path], object]
    hostile: Callable[[], list[dict[str, bytes]]] = list
    damage: Callable[[bytes, random.Random], bytes] | None = None  # None: bytes


def damage_bytes(data: bytes, rng: random.Random) -> bytes:
    """A few changes of the kinds that break parsers."""
    content = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        size = len(content)
        if size < 4:
            return bytes(content) + rng.randbytes(4)
        at, kind = rng.randrange(size - 3), rng.randrange(8)
        if kind == 0:
            content[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del content[at:]
        elif kind == 2:
            del content[at : at + rng.choice((1, 4, 100))]
        elif kind == 3:
            content[at:at] = rng.randbytes(rng.choice((1, 4, 100)))
        elif kind == 4:
            start = rng.randrange(size)
            content[at:at] = content[start : start + rng.choice((1, 16, 300))]
        elif kind == 5:
            number = rng.choice(EXTREMES) % 2**64
            width, order = rng.choice((1, 2, 4, 8)), rng.choice(("little", "big"))
            content[at : at + width] = (number % 2 ** (8 * width)).to_bytes(width, order)  # pyright: ignore[reportArgumentType]
        elif kind == 6:
            content[at : at + 4] = bytes(4)
        else:
            content[at] = rng.choice(b"0123456789\"'{}[](),.:-\\\n\x00\xff")
    return bytes(content)


def damage_json(data: bytes, rng: random.Random) -> bytes:
    """Lines of JSON with values exchanged for odd ones, dropped or moved; sometimes damaged as bytes."""
    if rng.random() < 0.25:
        return damage_bytes(data, rng)
    lines = data.splitlines()
    chosen = rng.randrange(len(lines))
    value = json.loads(lines[chosen])
    for _ in range(rng.choice((1, 1, 2, 3))):
        _change_inside(value, rng)
    lines[chosen] = json.dumps(value).encode()
    return b"\n".join(lines) + b"\n"


def damage_records(data: bytes, rng: random.Random) -> bytes:
    """Records with odd values and, mostly, the checksum of what they hold now: anybody can compute it."""
    damaged = damage_json(data, rng)
    return b"".join(_with_checksum(line) + b"\n" for line in damaged.splitlines()) if rng.random() < 0.8 else damaged


def _with_checksum(line: bytes) -> bytes:
    from dosimeter.records import CHECKSUM, _checksum

    try:
        content = json.loads(line)
        content.pop(CHECKSUM, None)
        return json.dumps(content | {CHECKSUM: _checksum(content)}).encode()
    except (ValueError, AttributeError, TypeError):
        return line


def _change_inside(value: Any, rng: random.Random) -> None:
    while isinstance(value, (dict, list)) and value:
        key = rng.choice(list(value)) if isinstance(value, dict) else rng.randrange(len(value))
        if not isinstance(value[key], (dict, list)) or not value[key] or rng.random() < 0.3:
            if rng.random() < 0.2:
                del value[key]
            else:
                value[key] = copy.deepcopy(rng.choice(ODD_VALUES))  # changed later, perhaps
            return
        value = value[key]


def damage_toml(data: bytes, rng: random.Random) -> bytes:
    """Values exchanged for odd ones, lines dropped, doubled or mixed; sometimes damaged as bytes."""
    if rng.random() < 0.25:
        return damage_bytes(data, rng)
    lines = data.decode().splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at, kind = rng.randrange(len(lines)), rng.randrange(5)
        if kind <= 2 and "=" in lines[at]:
            lines[at] = lines[at].partition("=")[0] + "= " + rng.choice(ODD_TOML)
        elif kind == 3:
            lines.insert(rng.randrange(len(lines)), lines[at])
        elif len(lines) > 1:
            del lines[at]
    return "\n".join(lines).encode()


def picture_bytes(kind: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB") -> bytes:
    content = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), np.uint8)).convert(mode).save(content, kind)
    return content.getvalue()


def zip_bytes(files: dict[str, bytes], packing: int = zipfile.ZIP_DEFLATED) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w", packing) as archive:
        for name, data in files.items():
            archive.writestr(zipfile.ZipInfo(name), data, packing)
    return content.getvalue()


def npz_bytes(compressed: bool = False, **arrays: np.ndarray) -> bytes:
    content = io.BytesIO()
    (np.savez_compressed if compressed else np.savez)(content, **arrays)  # pyright: ignore[reportArgumentType]
    return content.getvalue()


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + b"".join(struct.pack(">I", side) for side in array.shape) + array.tobytes()


def small_images() -> list[dict[str, bytes]]:
    modes = [("PNG", "RGB"), ("PNG", "L"), ("PNG", "P"), ("PNG", "I;16"), ("JPEG", "RGB"), ("BMP", "RGB"), ("GIF", "P")]
    modes += [("TIFF", "RGB"), ("WEBP", "RGB"), ("PPM", "RGB"), ("PPM", "L")]
    suffix = {"JPEG": "jpg", "PPM": "ppm", "TIFF": "tif"}
    return [{f"a.{suffix.get(kind, kind.lower())}": picture_bytes(kind, mode=mode)} for kind, mode in modes]


def bombs() -> list[dict[str, bytes]]:
    large = io.BytesIO()
    Image.new("1", (9000, 9000)).save(large, "PNG")
    packer = zlib.compressobj(1)
    tile = b"".join(packer.compress(bytes(25_000)) for _ in range(25_000)) + packer.flush()
    tags = [(256, 16), (257, 16), (258, 8), (259, 8), (262, 1), (277, 1), (322, 25_000), (323, 25_000), (324, 134), (325, len(tile))]
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags)
    tiled = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + tile
    return [{"a.tif": tiled}, {"a.png": large.getvalue()}, {"a.png": b""}, {"a.png": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"}]


def small_folders() -> list[dict[str, bytes]]:
    entries = [{"file": "1.png", "index": 2}, {"file": "2.png", "index": 0, "label": "x"}]
    manifest = json.dumps(entries).encode()
    return [{"manifest.json": manifest, "1.png": picture_bytes(), "2.png": picture_bytes()}]


def hostile_folders() -> list[dict[str, bytes]]:
    pictures = {"1.png": picture_bytes(), "2.png": picture_bytes()}
    texts = [json.dumps([{"file": "1.png", "label": str(number)} for number in range(10**4)])]
    texts += [json.dumps([{"file": "1.png", "index": value}]) for value in (10**9, -1, 2**64, 1.5, "x", None, [], True)]
    texts += ["[" * 10**5, "{}", "[]", "[1]", '[{"file": "../../etc/passwd", "index": 0}]', '[{"file": "1.png"}]', "null", "9" * 5000]
    return [{"manifest.json": text.encode(), **pictures} for text in texts]


def small_zips() -> list[dict[str, bytes]]:
    files = {"a/1.png": picture_bytes(), "b/1.png": picture_bytes("JPEG")}
    packings = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA)  # the last two are refused
    return [{"set.zip": zip_bytes(files, packing)} for packing in packings]


def hostile_zips() -> list[dict[str, bytes]]:
    names = ("../x.png", "/x.png", "C:/x.png", "..\\x.png", ".", "", "a//b.png", "\x00.png", "a" * 300 + ".png", "manifest.json")
    return [{"set.zip": zip_bytes({"a/1.png": picture_bytes(), name: b"x"})} for name in names] + [
        {"set.zip": zip_bytes({"a/1.png": bytes(270 * 10**6)})},
        {"set.zip": zip_bytes({"a/1.png": picture_bytes(), "manifest.json": b"[" + b"{}," * 2 * 10**7 + b"{}]"})},
        {"set.zip": zip_bytes({f"a/{number}.png": picture_bytes(size=(400, 400))[:1000] for number in range(3)})},
        {"set.zip": zip_bytes({})},
    ]


PIXELS = np.random.default_rng(1).integers(0, 256, (6, 5, 5, 3), np.uint8)
LABELS = np.arange(6) % 3


def small_npz() -> list[dict[str, bytes]]:
    return [
        {"set.npz": npz_bytes(compressed, images=images, labels=LABELS.astype(kind), class_names=np.array(["a", "b", "c"]))}
        for compressed in (False, True)
        for images, kind in ((PIXELS, "<i8"), (PIXELS / 255, ">i4"), (PIXELS[..., 0], "u1"))
    ]


def hostile_npz() -> list[dict[str, bytes]]:
    shapes = ("(70368744177664,)", "(-1,)", "()", "(0,)", "(2**40, 0)", "(1, 2, 3, 10000000000000)", "'x'", "(True,)", "(1.5,)")
    kinds = ("|u1", "|O", "V8", "<U1000000000", "[('a', 'O')]", "<m8", "c16")
    headers = [f"{{'descr': {kind!r}, 'fortran_order': False, 'shape': {shape}}}" for shape in shapes for kind in kinds[:2]]
    headers += [f"{{'descr': {kind!r}, 'fortran_order': True, 'shape': (1,)}}" for kind in kinds] + [
        "",
        "{",
        "(" * 3000,
        "__import__('os')",
    ]
    made = [b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text.encode() + b"1234" for text in headers]
    large = npz_bytes(True, images=np.zeros((270, 1000, 1000), np.uint8), labels=np.zeros(270, np.int64))
    objects = npz_bytes(images=np.array([{}], dtype=object), labels=LABELS)
    labels = [npz_bytes(images=PIXELS, labels=LABELS + value) for value in (2**31, 10**9, -1)]
    labels.append(npz_bytes(True, images=PIXELS, labels=LABELS, class_names=np.full(10**7, "a")))
    return [{"set.npz": zip_bytes({"images.npy": data, "labels.npy": data})} for data in made] + [
        {"set.npz": data} for data in (large, objects, *labels)
    ]


def small_idx() -> list[dict[str, bytes]]:
    images, labels = idx_bytes(PIXELS[..., 0]), idx_bytes(LABELS.astype(np.uint8))
    return [
        {"train-images-idx3-ubyte": images, "train-labels-idx1-ubyte": labels},
        {"train-images-idx3-ubyte.gz": gzip.compress(images), "train-labels-idx1-ubyte.gz": gzip.compress(labels)},
    ]


def hostile_idx() -> list[dict[str, bytes]]:
    labels = {"train-labels-idx1-ubyte": idx_bytes(LABELS.astype(np.uint8))}
    shapes = ((2**32 - 1,) * 3, (0, 0, 0), (2**31, 1, 1), (0, 2**32 - 1, 2**32 - 1))
    heads = [b"\x00\x00\x08\x03" + struct.pack(">III", *shape) for shape in shapes]
    large = gzip.compress(b"\x00\x00\x08\x03" + struct.pack(">III", 300, 1000, 1000) + bytes(300 * 10**6), 1)
    return [{"train-images-idx3-ubyte": head, **labels} for head in heads] + [{"train-images-idx3-ubyte.gz": large, **labels}]


def small_cifar() -> list[dict[str, bytes]]:
    data = np.random.default_rng(2).integers(0, 256, (3, 3072), np.uint8)
    labels: Sequence[Any] = ([0, 1, 2], np.array([0, 1, 2]), np.array([0, 1, 2], ">i8"))
    return [{"data_batch_1": pickle.dumps({"data": data, "labels": ids}, protocol)} for ids in labels for protocol in (2, 4, 5)]


def hostile_pickles() -> list[bytes]:
    class Runs:
        def __reduce__(self) -> Any:
            import os

            return os.system, ("touch it-ran",)

    huge = b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\nndarray\n"
    return [
        b"\x80\x02}r\xff\xff\xff\x7f.",
        b"\x80\x02" + huge + b"J\x00\x00\x00\x70\x85U\x01btR.",
        b"\x80\x02" + huge + b"(J\xff\xff\xff\x7fJ\xff\xff\xff\x7ftU\x01dtR.",
        b"\x80\x04\x8e\x00\x00\x00\x00\x00\x01\x00\x00.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7f}.",
        b"\x80\x02}K\x01\x85q\x00" + b"h\x00\x86q\x00" * 60 + b"K\x01s.",
        b"\x80\x02}K\x01\x85" + b"2\x86" * 60 + b"K\x01s.",
        b"\x80\x02" + b"(" * 10**5 + b".",
        b"\x80\x02]" + b"]a" * 10**5 + b".",
        b"\x80\x02" + b"]" * 50000 + b"a" * 49999 + b".",
        b"\x80\x02cbuiltins\neval\n.",
        b"\x80\x02\x8a\xff" + b"\x7f" * 255 + b".",
        b"p99999999999\n.",
        *(pickle.dumps({"data": Runs()}, protocol) for protocol in (0, 2, 4)),
    ]


def hostile_cifar() -> list[dict[str, bytes]]:
    labels: list[Any] = [1]
    for _ in range(60):
        labels = [labels, labels]
    nested = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": labels}, 2)
    return [{"data_batch_1": data} for data in (*hostile_pickles(), nested)]


def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(12, 4), nn.ReLU(), nn.Linear(4, 3)).eval()


def small_weights() -> list[dict[str, bytes]]:
    from safetensors.torch import save

    state, new, old = model().state_dict(), io.BytesIO(), io.BytesIO()
    torch.save(state, new)
    torch.save({"state_dict": state, "epoch": 3}, old, _use_new_zipfile_serialization=False)
    return [{"weights.safetensors": save(state)}, {"weights.pt": new.getvalue()}, {"weights.th": old.getvalue()}]


def hostile_weights() -> list[dict[str, bytes]]:
    from safetensors.torch import save

    state, content = model().state_dict(), io.BytesIO()
    torch.save({name: tensor.expand(10**6, *tensor.shape) for name, tensor in state.items()}, content)
    odd = [{name: tensor.to(kind) for name, tensor in state.items()} for kind in (torch.complex64, torch.int64, torch.float16)]
    headers = ('{"a":{"dtype":"F32","shape":[99999999999],"data_offsets":[0,4]}}', "{" * 1000, "[]", '{"__metadata__": 3}')
    cut = [struct.pack("<Q", len(text)) + text.encode() + b"1234" for text in headers] + [struct.pack("<Q", 2**63) + b"{}"]
    pickles = [{name: data} for data in hostile_pickles() for name in ("weights.pt", "weights.th")]
    packed = [{"weights.pt": zip_bytes({"archive/data.pkl": data, "archive/version": b"3"})} for data in hostile_pickles()]
    packed += [{"weights.pt": zip_bytes({"archive/data.pkl": b"\x80\x02" + b"]" * 10**8 + b".", "archive/version": b"3"})}]
    bomb = {"weights.pt": zip_bytes({"archive/data/0": bytes(270 * 10**6), "archive/data.pkl": b"\x80\x02}."})}
    return (
        [{"weights.safetensors": data} for data in (*map(save, odd), *cut)] + [{"weights.pt": content.getvalue()}, bomb] + pickles + packed
    )


@cache
def _exposure() -> Any:
    import dosimeter as dm

    images = torch.rand(12, 3, 2, 2, generator=torch.Generator().manual_seed(2))
    auxiliary = dm.Batch(images[4:], torch.arange(8) % 2)
    return dm.observe(model(), dm.Batch(images[:4], torch.arange(4) % 2), auxiliary=auxiliary)


def _attack() -> Any:
    import dosimeter as dm

    return dm.reconstruct(_exposure(), "inverting_gradients", labels=torch.arange(4) % 2, steps=12)


def _decoder_settings() -> Any:
    from dosimeter.engines.decoder.settings import DecoderSettings

    return DecoderSettings(width=2, epochs=1)


@cache
def small_decoders() -> list[dict[str, bytes]]:
    from dosimeter.engines.decoder.cache import train_or_load
    from dosimeter.engines.decoder.target import Target

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "decoder.safetensors"
        train_or_load(Target.of(_exposure()), _exposure().auxiliary.inputs, _decoder_settings(), path)
        return [{path.name: path.read_bytes()}]


def hostile_decoders() -> list[dict[str, bytes]]:
    """Facts of other kinds, with the weights as they were and the fingerprint of the weights that they have."""
    from safetensors.torch import load, save

    (honest,) = small_decoders()[0].values()
    facts, tensors = json.loads(honest[8 : 8 + struct.unpack("<Q", honest[:8])[0]])["__metadata__"], load(honest)
    shapes = (
        {"feature": [10**9, 1, 1]},
        {"image": [3, 10**6, 10**6]},
        {"width": 10**8},
        {"width": 20_000},
        {"width": -1},
        {"finest": 0},
        {"x": 1},
    )
    changed = [facts | {"shape": json.dumps(json.loads(facts["shape"]) | shape)} for shape in shapes]
    changed += [facts | {name: value} for name in facts for value in ("", "null", "[]", "1e400", "\x00", "9" * 5000)]
    changed += [{name: value for name, value in facts.items() if name != left} for left in facts]
    return [{"decoder.safetensors": save(tensors, some)} for some in changed] + [
        {"decoder.safetensors": files["weights.safetensors"]} for files in hostile_weights() if "weights.safetensors" in files
    ]


@cache
def small_checkpoints() -> list[dict[str, bytes]]:
    """The checkpoint of an attack under the name that the attack looks for."""
    from dosimeter.artefacts import CheckpointFile, save_checkpoints

    kept, remove = [], CheckpointFile.remove
    CheckpointFile.remove = lambda self: kept.append({self.path.name: self.path.read_bytes()})
    try:
        with tempfile.TemporaryDirectory() as folder, save_checkpoints(folder, 0):
            _attack()
    finally:
        CheckpointFile.remove = remove
    return kept


def hostile_checkpoints() -> list[dict[str, bytes]]:
    """Tensors of other shapes, types and names, with the fingerprint of the tensors that they are."""
    from safetensors.torch import load, save

    from dosimeter.artefacts import CONTENTS, fingerprint_of_tensors

    ((name, honest),) = small_checkpoints()[0].items()
    state = load(honest)
    changed: list[dict[str, torch.Tensor]] = []
    for key, tensor in state.items():
        changed += [{other: value for other, value in state.items() if other != key}]
        for odd in (tensor.flatten()[:0], tensor[None].clone(), tensor.to(torch.complex64), tensor.to(torch.int8), tensor * 0 - 1):
            changed.append(state | {key: odd.contiguous()})
        if tensor.is_floating_point():
            changed.append(state | {key: torch.full_like(tensor, torch.nan)})
    return [{name: save(tensors, {CONTENTS: fingerprint_of_tensors(tensors)})} for tensors in changed]


@cache
def small_captures() -> list[dict[str, bytes]]:
    import dosimeter as dm

    client = model()
    for parameter in client.parameters():
        parameter.data += 0.01 * torch.rand(parameter.shape, generator=torch.Generator().manual_seed(1))
    training = dm.FedAvg(learning_rate=0.1, steps=2)
    with tempfile.TemporaryDirectory() as folder:
        first = {"round": 3, "client": "7", "training": training, "batch_size": 4, "input_shape": (3, 2, 2), "framework": "by hand"}
        written = dm.write_capture(folder, client.state_dict(), before=model().state_dict(), kind="weights", **first)
        setting = dm.privacy("flower_local_dp", clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5)
        other = dm.write_capture(Path(folder) / "other", model().state_dict(), kind="gradient", privacy=setting)
        beside = next(Path(folder).glob("model-*"))
        return [{path.name: path.read_bytes(), beside.name: beside.read_bytes()} for path in (written, other)]


def hostile_captures() -> list[dict[str, bytes]]:
    facts = (
        '{"format": 3, "kind": "weights"}',
        '{"format": 2, "kind": "weights", "privacy": {"name": "flower_local_dp", "clipping_norm": -1}}',
        '{"format": 2, "kind": "weights", "privacy": {"name": "os:system"}}',
        '{"format": 1}',
        "[" * 9999,
        '{"format": 1, "kind": "weights", "round": 1' + "0" * 5000 + "}",
    )
    facts += ('{"format": true, "kind": "weights"}', '{"format": 1, "kind": "weights", "training": {"name": "os:system"}}', "")
    entry = {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}
    named = [json.dumps({"__metadata__": {"dosimeter_capture": text}, "a": entry}) for text in facts]
    odd = [json.dumps({"__metadata__": {"dosimeter_capture": '{"format": 1, "kind": "gradient"}'}, "a": odd}) for odd in ODD_VALUES]
    files = [struct.pack("<Q", len(text.encode())) + text.encode() + b"1234" for text in named + odd]
    return [{"capture.safetensors": data} for data in files] + hostile_weights()[:8]


def damage_capture(data: bytes, rng: random.Random) -> bytes:
    """A safetensors file with damaged bytes, or with values of its header or of its facts exchanged for odd ones."""
    if rng.random() < 0.4:
        return damage_bytes(data, rng)
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = json.loads(header.get("__metadata__", {}).get("dosimeter_capture", "{}"))
    _change_inside(facts if facts and rng.random() < 0.6 else header, rng)
    if facts and isinstance(header.get("__metadata__"), dict) and "dosimeter_capture" in header["__metadata__"]:
        header["__metadata__"]["dosimeter_capture"] = json.dumps(facts)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data[8 + length :]


def _records() -> bytes:
    """The records of a small audit with its membership, and of a small grid of defenses."""
    import dosimeter as dm
    from dosimeter.records import FILE_NAME

    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        batch, other = (dm.Batch(torch.rand(n, 3, 8, 8), torch.arange(n) % 2) for n in (3, 8))
        net = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.ReLU(), nn.Linear(8, 5))
        attacks = [dm.attack("dlg", steps=2), dm.attack("inverting_gradients", steps=2)]
        for defenses in ((), ("sign",)):
            methods = {"labels": ["idlg", "ilrg"], "features": ["subspace"], "attacks": attacks}
            dm.audit(net, batch, auxiliary=other, defenses=defenses, out=folder, **methods)
        return (Path(folder) / FILE_NAME).read_bytes()


@cache
def small_records() -> list[dict[str, bytes]]:
    return [{"records.jsonl": _records()}]


def hostile_records() -> list[dict[str, bytes]]:
    texts = ("[" * 10**5, "{}", "null", "[]", '{"key": NaN}', '{"key":' * 10**4, "\x00", "9" * 10**5)
    return [{"records.jsonl": f"{text}\n{text}\n".encode()} for text in texts]


AUDIT_TOML = b"""seed = 3
labels = ["idlg", {name = "rlg", margin = 0.01}]
features = []
attacks = [{name = "dlg", steps = 3}]
attack_labels = "given"
budget = "quick"
adaptive = false
declare_batch_size = true
device = "cpu"
defenses = [{name = "gaussian_noise", std = 0.1}]
[training]
name = "fedavg"
steps = 2
learning_rate = 0.1
[loss]
name = "focal"
gamma = 2.0
[model]
name = "small_cnn"
mode = "eval"
seed = 0
[data]
name = "digits"
size = 8
batch_size = 3
auxiliary = 10
sampler = {name = "unique"}
normalization = {mean = [0.5], std = [0.5]}
"""


def small_audits() -> list[dict[str, bytes]]:
    return [{"audit.toml": AUDIT_TOML}]


def hostile_tomls() -> list[dict[str, bytes]]:
    texts = [
        "a = " + "[" * 10**4,
        "a." * 10**5 + "b = 1",
        '"\\"".' * 10**5 + "b = 1",
        "a = {" + "b." * 10**5 + "c = 1}",
        "x = 1979-05-27",
        "[a]\n[a]",
        "\x00",
        "a = 0x" + "f" * 10**4,
        "a = 1" + "0" * 5000,
    ]
    texts += [f"[data]\nsize = {value}" for value in ODD_TOML] + [f"[data.normalization]\nstd = {value}" for value in ODD_TOML]
    texts += [f"{key} = {value}" for key in ("device", "seed", "labels", "defenses") for value in ('"hpu"', *ODD_TOML)]
    return [{"audit.toml": text.encode()} for text in texts]


def small_tables() -> list[dict[str, bytes]]:
    folder = Path(__file__).resolve().parents[1] / "papers"
    return [{"table.toml": path.read_bytes()} for path in sorted(folder.glob("*/*.toml"))[::6]]


SWEEP_TOML = b"""models = ["small_cnn", {name = "lenet5", mode = "eval"}]
data = ["digits", {name = "photographs", size = 32}]
batch_sizes = [1, 2]
defenses = [[], [{name = "gaussian_noise", std = 0.01}, "sign"]]
seeds = [0, 1, 2]
labels = ["ilrg"]
features = ["subspace"]
attacks = [{name = "dlg", steps = 3}]
label_source = "given"
declare_batch_size = false
device = "cpu"
[training]
name = "fedavg"
steps = 2
[loss]
name = "cross_entropy"
"""


def small_sweeps() -> list[dict[str, bytes]]:
    return [{"sweep.toml": SWEEP_TOML}]


def hostile_sweeps() -> list[dict[str, bytes]]:
    """Lists whose product is endless, and odd values for each key."""
    many = list(range(1, 3000))
    texts = [f"labels = ['idlg']\nseeds = {many}\nbatch_sizes = {many}", f"labels = ['idlg']\nseeds = {many * 100}"]
    texts += [f"labels = ['idlg']\nbatch_sizes = {many}\ndefenses = {['sign'] * 9}\nseeds = {many}\ndata = {['digits'] * 99}"]
    keys = ("models", "data", "batch_sizes", "defenses", "seeds", "labels", "label_source")
    return [{"sweep.toml": text.encode()} for text in (*texts, *(f"{key} = {value}" for key in keys for value in ODD_TOML))]


@cache
def small_cells() -> list[dict[str, bytes]]:
    """The folder of a sweep, with one record."""
    import dosimeter as dm
    from dosimeter.records import write_cell

    with tempfile.TemporaryDirectory() as folder:
        write_cell(folder, "a" * 16, dm.audit(model(), _batch(), labels=["idlg"], attacks=[], features=[], maps=[]).records[0])
        return [{f"cells/{path.name}": path.read_bytes() for path in (Path(folder) / "cells").iterdir()}]


def _batch() -> Any:
    import dosimeter as dm

    return dm.Batch(torch.rand(4, 3, 2, 2, generator=torch.Generator().manual_seed(5)), torch.arange(4) % 2)


def _read_images(path: Path) -> object:
    from dosimeter.data.readers.images import read_images

    return read_images(path, size=4)


def _read_folder(path: Path) -> object:
    return _read_images(path.parent)


def _read_weights(path: Path) -> None:
    from dosimeter.models.loading import load_weights

    load_weights(model(), path)


def _read_decoder(path: Path) -> object:
    from dosimeter.engines.decoder.cache import obtain

    return obtain(_exposure(), _decoder_settings(), str(path))


def _read_checkpoint(path: Path) -> object:
    """An attack that finds the file in the place of its own checkpoint."""
    from dosimeter.artefacts import save_checkpoints

    with save_checkpoints(path.parent, 3600):
        found = _attack()
    if found.outcome.value == "crashed":
        raise RuntimeError(found.message)
    return found


def _read_capture(path: Path) -> object:
    import dosimeter as dm
    from dosimeter.cli import main

    _expect(main(["capture", "show", str(path)]))
    return dm.read_capture(path).receive(model(), input_shape=(3, 2, 2))


def _read_records(path: Path) -> object:
    """The report, what `dm.read` makes of them, the summaries that are printed, and a question in SQL."""
    import dosimeter as dm
    from dosimeter.report import write_report
    from dosimeter.terminal.formats import markdown

    found = dm.read(path.parent)
    page = write_report(path.parent)
    return found.verdicts, repr(found), markdown(found, [], page, str(path.parent)), _ask(path.parent)


def _ask(folder: Path) -> object:
    from dosimeter.cli import main

    if importlib.util.find_spec("duckdb") is None:
        return None
    return _expect(main(["ask", str(folder), "SELECT * FROM records LEFT JOIN samples USING (key)", "--json"]))


def _expect(code: int) -> int:
    if code not in (0, 2):
        raise AssertionError(f"exit code {code}")
    return code


def _read_cells(path: Path) -> object:
    import dosimeter as dm
    from dosimeter.report import write_report

    folder = path.parent.parent
    return dm.read(folder).verdicts, write_report(folder), _ask(folder)


def _read_sweep(path: Path) -> object:
    from dosimeter.config import construct, override, read_toml
    from dosimeter.runs.sweep import Sweep, cells_of

    return cells_of(construct(Sweep, override(read_toml(path), [])))


def _read_received(path: Path) -> object:
    """The capture as the command line audits it."""
    from dosimeter.cli import main

    methods = ['labels=["idlg"]', "features=[]", "maps=[]", "attacks=[]", "targets=[]", "tokens=[]"]
    words = ["model=fcn3", "model.options.layers=2", *methods]
    return _expect(main(["audit", *words, "--capture", str(path), "--out", str(path.parent / "out")]))


def _read_audit(path: Path) -> object:
    from dosimeter.config import construct, describe, digest, override, read_toml
    from dosimeter.runs.audit import AuditConfig
    from dosimeter.runs.devices import choose_device

    config = construct(AuditConfig, override(read_toml(path), []))
    choose_device(config.device)
    return digest(describe(config))


def _read_table(path: Path) -> object:
    from dosimeter.runs.reproduction.tables import read_table

    return [read_table(str(path), quick=quick) for quick in (False, True)]


READERS = (
    Reader("picture", small_images, _read_folder, bombs),
    Reader("manifest", small_folders, _read_folder, hostile_folders, damage_json),
    Reader("zip", small_zips, _read_images, hostile_zips),
    Reader("npz", small_npz, _read_images, hostile_npz),
    Reader("idx", small_idx, _read_images, hostile_idx),
    Reader("cifar", small_cifar, _read_images, hostile_cifar),
    Reader("weights", small_weights, _read_weights, hostile_weights),
    Reader("decoder", small_decoders, _read_decoder, hostile_decoders),
    Reader("checkpoint", small_checkpoints, _read_checkpoint, hostile_checkpoints),
    Reader("capture", small_captures, _read_capture, hostile_captures, damage_capture),
    Reader("received", small_captures, _read_received, hostile_captures, damage_capture),
    Reader("records", small_records, _read_records, hostile_records, damage_records),
    Reader("cells", small_cells, _read_cells, list, damage_records),
    Reader("sweep", small_sweeps, _read_sweep, hostile_sweeps, damage_toml),
    Reader("audit", small_audits, _read_audit, hostile_tomls, damage_toml),
    Reader("table", small_tables, _read_table, list, damage_toml),
)
