"""What a gradient of a language model gives away: token sets and whole texts, by `embedding_rows`, `dager`, and by gradient matching.

    python benchmarks/tokens.py [--cases decoder,encoder,fedavg,lora,rows,false,matching] [--seed 0] [--device cuda] [--layers 12]

Models have the shapes of GPT-2 and BERT (12 layers of width 768) and random weights, which stand in for pretrained ones. Texts are
sentences of the manual that Python brings along, over a byte-pair vocabulary of 10,000 tokens that is trained on it (`byte_pairs.py`).
The case `matching` sets `tag` and `lamp` beside `dager` and guessing, on the same batches; its auxiliary texts are other sentences.
Prints for each case: ROUGE-1 and exact texts in per cent, certified tokens and texts, false ones among the certified, the rank, and
seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from byte_pairs import Tokenizer, sentences
from torch import nn

import dosimeter as dm
from dosimeter.models.transformer import Transformer

VOCABULARY = 10_000
DECODER = [(1, 16), (2, 16), (4, 16), (8, 16), (16, 16), (32, 16), (64, 8), (64, 12)]  # batch size, longest text
KNOWN = 200  # sentences that the server has, in the case `matching`
ROWS = 1000  # random batches of the case `rows`


class Adapted(nn.Module):
    """LoRA (Hu et al., ICLR 2022): W x + B A x with W frozen, after a first round, so that B is not zero."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, rank, bias=False), nn.Linear(rank, layer.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=1e-3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layer(inputs) + self.up(self.down(inputs))


def model_of(kind: str, options: argparse.Namespace, *, classes: int | None = 2, rank: int | None = None) -> nn.Module:
    torch.manual_seed(options.seed)
    heads = 12 if options.width % 12 == 0 else max(1, options.width // 64)
    model = Transformer(kind, vocabulary=VOCABULARY, layers=options.layers, width=options.width, heads=heads, classes=classes)  # type: ignore[arg-type]
    if rank is not None:
        model.requires_grad_(False)
        for block in model.blocks:
            block.attention.query, block.attention.value = Adapted(block.attention.query, rank), Adapted(block.attention.value, rank)
            block.expand = Adapted(block.expand, rank)
    return model.to(options.device).eval()


def batch_of(texts: list[list[int]], size: int, longest: int, seed: int, device: str) -> dm.Batch:
    """Different sentences, cut to `longest` tokens and padded by a mask."""
    chosen = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[:size].tolist()
    ids, mask = torch.zeros(size, longest, dtype=torch.int64), torch.zeros(size, longest, dtype=torch.int64)
    for row, index in enumerate(chosen):
        text = texts[index][:longest]
        ids[row, : len(text)], mask[row, : len(text)] = torch.tensor(text), 1
    labels = torch.randint(2, (size,), generator=torch.Generator().manual_seed(seed))
    return dm.Batch({"input_ids": ids.to(device), "attention_mask": mask.to(device)}, labels.to(device))


def measure(name: str, model: nn.Module, batch: dm.Batch, training: Any = None) -> dict[str, Any]:
    exposure = dm.observe(model, batch, training=training)
    started = time.perf_counter()
    try:
        found = dm.recover_tokens(exposure, "dager")
    except dm.Refused as refusal:
        return {"case": name, "refused": str(refusal)}
    seconds = time.perf_counter() - started
    scores = dm.score(found, batch)
    mask = batch.inputs.tensors["attention_mask"].bool()
    true = set(batch.inputs.main[mask].tolist())
    rouge = scores["rouge1"].nan_to_num() if "rouge1" in scores else torch.zeros(1)
    exact = scores["sequence_match"].nan_to_num() if "sequence_match" in scores else torch.zeros(1)
    return {
        "case": name,
        "vectors": int(mask.sum()),
        "rank": found.details["rank"],
        "rouge1": round(100 * float(rouge.mean()), 2),
        "exact": round(100 * float(exact.mean()), 2),
        "recall": round(100 * float(scores["token_recall"]), 2),
        "certified_tokens": len(found.certified),
        "tokens": len(true),
        "false_tokens": len(found.certified - true),
        "certified_texts": sum(found.certified_sequences),
        "false_certificates": scores.details["false_certificates"],
        "seconds": round(seconds, 1),
        "message": found.message,
    }


def matching(texts: list[list[int]], options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """`tag` and `lamp`, with and without the rows of the embedding, beside `dager` and tokens drawn by how common they are."""
    tag, lamp = {"steps": options.steps}, {"steps": options.steps, "candidates": 100, "proposals": 60}
    runs = [("dager", {}), ("tag", tag), ("lamp", lamp), ("tag", tag | {"rows": True}), ("lamp", lamp | {"rows": True})]
    for kind in ("gpt2", "bert"):
        model = model_of(kind, options)
        for size in (1, 2):
            batch = batch_of(texts, size, 8, options.seed, options.device)
            known = batch_of(texts[::-1], KNOWN, 16, options.seed + 1, options.device)
            exposure = dm.observe(model, batch, auxiliary=known)
            for name, chosen in runs:
                started = time.perf_counter()
                found = dm.recover_tokens(exposure, name, **chosen)
                seconds = time.perf_counter() - started
                scores = dm.score(found, batch, auxiliary=known)
                shares = {one: round(100 * float(scores[one].nan_to_num().mean()), 1) for one in ("rouge1", "rouge2", "sequence_match")}
                guessed = round(100 * float(scores.nulls["unigram"]["rouge1"].nan_to_num().mean()), 1)
                case = f"{kind}, B = {size}, {name}{' with rows' if chosen.get('rows') else ''}"
                yield {"case": case, **shares, "guessed_rouge1": guessed, "seconds": round(seconds, 1), "message": found.message}


def rows(options: argparse.Namespace) -> dict[str, Any]:
    """Exact sets by `embedding_rows` on random batches of a small model."""
    torch.manual_seed(options.seed)
    model = Transformer("gpt2", vocabulary=VOCABULARY, width=32, layers=1, heads=4, positions=32, classes=2).eval()
    rng, exact = torch.Generator().manual_seed(options.seed), 0
    for draw in range(ROWS):
        ids = torch.randint(VOCABULARY, (1 + draw % 8, 1 + draw % 24), generator=rng)
        found = dm.recover_tokens(dm.observe(model, dm.Batch(ids, torch.arange(len(ids)) % 2)))
        exact += found.certified == set(ids.flatten().tolist()) == found.tokens
    return {"case": f"embedding_rows, {ROWS} random batches", "exact_sets": exact}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", default="decoder,encoder,fedavg,lora,rows,false")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--largest", type=int, default=64, help="the largest batch of the decoder")
    parser.add_argument("--steps", type=int, default=1000, help="of the case `matching`")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    tokenizer = Tokenizer(VOCABULARY)
    texts = [ids for ids in map(tokenizer, dict.fromkeys(sentences())) if len(ids) >= 4]
    cases = options.cases.split(",")
    records = []

    def note(record: dict[str, Any]) -> None:
        records.append(record)
        print(json.dumps(record), flush=True)

    note({"texts": len(texts), "vocabulary": VOCABULARY, "device": options.device, "seed": options.seed, "layers": options.layers})
    if "decoder" in cases:
        model = model_of("gpt2", options)
        for size, longest in DECODER:
            if size <= options.largest:
                note(
                    measure(
                        f"gpt2, B = {size}, up to {longest} tokens", model, batch_of(texts, size, longest, options.seed, options.device)
                    )
                )
    if "encoder" in cases:
        model = model_of("bert", options)
        for size, longest in ((1, 16), (4, 16), (8, 16)):
            note(measure(f"bert, B = {size}, up to {longest} tokens", model, batch_of(texts, size, longest, options.seed, options.device)))
    if "fedavg" in cases:
        model = model_of("gpt2", options)
        for rate in (1e-4, 1e-3):
            for mini in (None, 4):
                training = dm.FedAvg(learning_rate=rate, steps=4, mini_batch=mini)
                name = f"gpt2, B = 16, FedAvg of 4 steps of {mini or 16} texts at {rate:g}"
                note(measure(name, model, batch_of(texts, 16, 16, options.seed, options.device), training))
    if "lora" in cases:
        for rank, size in ((16, 1), (256, 8)):
            model = model_of("gpt2", options, rank=rank)
            note(measure(f"gpt2, LoRA of rank {rank}, B = {size}", model, batch_of(texts, size, 16, options.seed, options.device)))
    if "rows" in cases:
        note(rows(options))
    if "matching" in cases:
        for record in matching(texts, options):
            note(record)
    if "false" in cases:
        model, certified, false, draw = model_of("gpt2", options), 0, 0, 0
        while certified < 10_000:
            draw += 1
            record = measure("", model, batch_of(texts, 32, 16, options.seed + draw, options.device))
            certified, false = certified + record.get("certified_tokens", 0), false + record.get("false_certificates", 0)
        note({"case": f"false certificates of gpt2, {draw} batches of 32", "certified_tokens": certified, "false_certificates": false})
    if options.out:
        options.out.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()
