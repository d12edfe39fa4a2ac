"""A decoder in half precision and in pieces, to carry it from one machine to another, and back.

python papers/rgla/pieces.py decoder.safetensors carried/decoder        # writes carried/decoder-0.safetensors, -1, ...
python papers/rgla/pieces.py --join decoder.safetensors carried/decoder-*.safetensors
"""

from __future__ import annotations

import sys
from pathlib import Path

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

LARGEST = 14_000_000  # bytes of a piece


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118


def split(source: Path, stem: str) -> None:
    tensors, facts = read(source)
    pieces: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        small = tensor.half() if tensor.ndim == 4 else tensor
        bytes_more = small.numel() * small.element_size()
        if pieces[-1] and size + bytes_more > LARGEST:
            pieces.append({})
            size = 0
        pieces[-1][name] = small.contiguous()
        size += bytes_more
    for number, piece in enumerate(pieces):
        save_file(piece, f"{stem}-{number}.safetensors", facts)


def join(destination: Path, pieces: list[Path]) -> None:
    tensors: dict[str, Tensor] = {}
    facts: dict[str, str] = {}
    for piece in pieces:
        found, facts = read(piece)
        tensors |= {name: tensor.float() if tensor.ndim == 4 else tensor for name, tensor in found.items()}
    save_file(tensors, destination, facts)


if __name__ == "__main__":
    if sys.argv[1] == "--join":
        join(Path(sys.argv[2]), [Path(word) for word in sys.argv[3:]])
    else:
        split(Path(sys.argv[1]), sys.argv[2])
