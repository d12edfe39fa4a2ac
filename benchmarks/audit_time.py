"""The CPU seconds of a whole default audit of a ResNet, method by method, and its verdicts.

    python benchmarks/audit_time.py --model resnet50 --batch 1 --data ../shared/data --out out/time
    python benchmarks/audit_time.py --model resnet18 --batch 4 --data ../shared/data --out out/time

ResNet-50 has 1,000 classes and sees photographs at 224 pixels; ResNet-18 has 10 and sees CIFAR-10 at 32. Both are untrained and in eval
mode. The server has 64 auxiliary images. One thread counts, so that two cores need between half of the seconds and all of them. A run that
is cut goes on from the folder `--out`, where each method's seconds stand in `times.jsonl`.
"""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import dosimeter as dm
from dosimeter.models.loading import load_model
from dosimeter.runs import audit as audit_module

MODELS = {"resnet18": (32, {}), "resnet50": (224, {"stem": "imagenet", "classes": 1000, "channels": 3})}
AUXILIARY = 64


def images(data: Path, side: int, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Drawn images with their labels; photographs have labels drawn at random."""
    rng = np.random.default_rng(seed)
    if side == 32:
        held = np.load(data / "cifar10.npz")
        chosen = rng.permutation(len(held["train_images"]))[:count]
        pixels = torch.from_numpy(held["train_images"][chosen]).permute(0, 3, 1, 2)
        return pixels.float() / 255, torch.from_numpy(held["train_labels"][chosen]).long()
    import io
    import zipfile

    from PIL import Image

    with zipfile.ZipFile(data / "imagenet_photos.zip") as archive:
        names = [name for name in archive.namelist() if name.lower().endswith((".jpg", ".jpeg", ".png"))]
        pictures = [
            Image.open(io.BytesIO(archive.read(names[i]))).convert("RGB").resize((side, side)) for i in rng.permutation(len(names))[:count]
        ]
    pixels = torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) for picture in pictures])
    return pixels.float() / 255, torch.from_numpy(rng.integers(0, 1000, count))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), required=True)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--record", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    side, given = MODELS[options.model]
    model = load_model(options.model, given, None, options.seed).eval()
    inputs, targets = images(options.data, side, options.batch + AUXILIARY, options.seed)
    own, others = (dm.Batch(inputs[part], targets[part]) for part in (slice(options.batch), slice(options.batch, None)))
    options.out.mkdir(parents=True, exist_ok=True)
    times = options.out / "times.jsonl"
    run = audit_module._run_or_record_crash

    def timed(client: Any, measurement: Any, *rest: Any) -> Any:
        began = time.process_time()
        record = run(client, measurement, *rest)
        row = [record.surface, record.method, round(time.process_time() - began, 1), record.verdict]
        with times.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        return record

    audit_module._run_or_record_crash = timed
    report = dm.audit(model, own, auxiliary=others, seed=options.seed, out=options.out / "audit", progress=None)
    rows = [json.loads(line) for line in times.read_text(encoding="utf-8").splitlines()]
    findings = [f"All methods: {sum(row[2] for row in rows):.0f} s of CPU on one thread, in one process or several that resumed."]
    findings.append(f"The peak of the last process is {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB.")
    findings += [f"{verdict.surface}: {verdict.verdict}. {verdict.reason}." for verdict in report.verdicts]
    findings += [f"{cut}." for cut in report.cuts]
    for row in rows:
        sys.stdout.write("{:12} {:24} {:8.1f} s  {}\n".format(*row))
    sys.stdout.write("\n".join(findings) + "\n")
    if options.record:
        from measured import write_measurement

        slow = [row for row in rows if row[2] >= 0.5]
        write_measurement(options.record, str(options.seed), ["surface", "method", "CPU [s]", "verdict"], slow, findings)


if __name__ == "__main__":
    main()
