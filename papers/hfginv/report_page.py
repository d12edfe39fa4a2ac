"""HFGInv's tables as a page: the numbers, how each row ended, and the pictures. For looking at, never for committing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

import torch
from safetensors import safe_open
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dosimeter.registry import METRICS

STYLE = """body{font:15px/1.5 system-ui,sans-serif;max-width:64rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;margin:1rem 0}td,th{padding:.25rem .75rem;border-bottom:1px solid #ccc;text-align:left}
figure{margin:.5rem 0}img{max-width:100%;display:block}"""

Lines = list[tuple[str, ...]]  # a table, its head first


def write_page(folder: Path, said: str, tables: dict[str, Lines], truths: dict[int, Tensor]) -> Path:
    """`truths` are each seed's pixels (B, 3, height, width); what was recovered lies in the folder's files."""
    parts = [f"<p>{escape(said)}</p>"]
    parts += [f"<h2>{escape(title)}</h2>{_table(lines)}" for title, lines in tables.items()]
    parts.append(f"<h2>How each row ended</h2>{_table(_endings(folder))}")
    for seed, truth in truths.items():
        parts.append(f"<h2>Batch {seed}</h2>{_figure(folder, truth, f'{seed}-truth.jpg', 'the photographs')}")
        for row, pixels in recovered_pixels(folder, seed):
            parts.append(_figure(folder, paired(pixels, truth), f"{seed}-{row}.jpg", row))
    page = folder / "index.html"
    head = f'<!doctype html><html lang="en"><meta charset="utf-8"><title>HFGInv, Tables 1 and 2</title><style>{STYLE}</style>'
    page.write_text(f"{head}<h1>HFGInv, Tables 1 and 2</h1>{''.join(parts)}</html>")
    return page


def paired(pixels: Tensor, truth: Tensor) -> Tensor:
    """The guesses (B, ...) in the photographs' order, one to one at the least LPIPS.

    Contents lie beside their places, which misleads a pairing by pixels, and some in the slots of others' labels.
    """
    size = len(truth)
    every = METRICS.build("lpips")(pixels.repeat(size, 1, 1, 1), truth.repeat_interleave(size, 0))
    return pixels[linear_sum_assignment(every.reshape(size, size).numpy())[1]]  # photographs × guesses


def recovered_pixels(folder: Path, seed: int) -> Iterator[tuple[str, Tensor]]:
    """Each row's name and what it recovered, (B, 3, height, width) in [0, 1]."""
    for file in sorted(folder.glob(f"{seed}-*.safetensors")):
        with safe_open(file, "pt") as stored:
            yield file.stem.split("-", 1)[1], stored.get_tensor("pixels").float() / 255


def _endings(folder: Path) -> Lines:
    """From the files' own facts: a distance of 0 is a matched update, 1 a cosine distance that says nothing.

    Where the objective is lower at the photographs than at the end, the attack was not done; where it is higher, the objective misled it.
    """
    lines: Lines = [("batch", "row", "steps", "seconds", "distance", "objective", "at the photographs", "outcome", "message")]
    for file in sorted(folder.glob("*-*.safetensors")):
        with safe_open(file, "pt") as stored:
            facts = json.loads(stored.metadata()["facts"])
        ends = ("–" if facts[name] is None else f"{facts[name]:.3g}" for name in ("distance", "objective", "at the photographs"))
        counts = (f"{facts['seed']}", facts["row"], f"{facts['steps']}", f"{facts['seconds']:.0f}")
        lines.append((*counts, *ends, facts["outcome"], facts["message"]))
    return lines


def _table(lines: Lines) -> str:
    head, *rows = ["".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in line) for tag, line in zip(["th"] + ["td"] * len(lines), lines)]
    return f"<table><tr>{head}</tr>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"


def _figure(folder: Path, pixels: Tensor, name: str, caption: str) -> str:
    """One row of pictures as a file beside the page."""
    from PIL import Image

    strip = torch.cat(list(pixels.clamp(0, 1)), 2)  # (3, height, B width)
    Image.fromarray((strip * 255).round().byte().permute(1, 2, 0).numpy()).save(folder / name, quality=85)
    return f'<figure><figcaption>{escape(caption)}</figcaption><img src="{name}" alt="{escape(caption)}"></figure>'
