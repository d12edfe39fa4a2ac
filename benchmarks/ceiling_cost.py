"""How long each bound takes beside one default attack: ResNet-18 on random photographs of 32 pixels, 8 samples.

    python benchmarks/ceiling_cost.py --device cuda

The attack is `inverting_gradients` with its default steps. `--steps` of them are timed, and the time is scaled to all. On a CPU the seconds
are those of the processor, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import torch
from measured import write_measurement

import dosimeter as dm
from dosimeter.registry import BOUNDS, MODELS

SAMPLES, KNOWN = 8, 64


def seconds_of(work) -> float:
    clock = time.perf_counter if torch.cuda.is_available() else time.process_time
    began = clock()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return clock() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--bounds", nargs="*", default=BOUNDS.names())
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    torch.manual_seed(words.seed)
    model = MODELS.entry("resnet18")(classes=10).to(words.device).eval()
    images = torch.rand(SAMPLES + KNOWN, 3, 32, 32, device=words.device)
    labels = torch.randint(0, 10, (len(images),), device=words.device)
    batch, known = dm.Batch(images[:SAMPLES], labels[:SAMPLES]), dm.Batch(images[SAMPLES:], labels[SAMPLES:])
    defenses = (dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.01),)
    rows = []
    for name in words.bounds:
        found = []
        seconds = seconds_of(
            lambda name=name, found=found: found.append(dm.ceilings(model, batch, defenses=defenses, auxiliary=known, bounds=[name]))
        )
        rows.append([name, round(seconds, 2), "; ".join(found[0].refused.values()) or "computed"])
        print(*rows[-1], flush=True)
    attack = dm.attack("inverting_gradients")
    exposure = dm.observe(model, batch, seed=words.seed)
    few = [seconds_of(lambda n=n: dm.reconstruct(exposure, attack.name, labels=batch.targets, steps=n)) for n in (1, words.steps + 1)]
    rows.append([f"{attack.name}, {attack.steps} steps", round((few[1] - few[0]) / words.steps * attack.steps, 1), "scaled"])
    print(*rows[-1])
    if words.record:
        write_measurement(words.record, str(words.seed), ["what", "seconds", ""], rows, [])


if __name__ == "__main__":
    main()
