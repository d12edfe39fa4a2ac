"""Is any claim about membership false, and does any test behind noise find more members than differential privacy allows?

    python benchmarks/membership.py --nets 400 --seed 60000

Random small nets without noise, dense ones, convolutions and nets over texts: of 40 candidates the first few are the batch. Some nets get
samples that are nearly alike, or a near copy of a member outside the batch; some have dropout in train mode, or a loss that is a sum. Then
DP-SGD on one net: the likelihood with all other samples known, beside the trade-off of the Gaussian mechanism, where the sample is left
out.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from pathlib import Path

import torch
from measured import write_measurement
from torch import nn

import dosimeter as dm
from dosimeter.client.gradients import per_sample_gradients
from dosimeter.engines.membership.estimate import true_positive_bound
from dosimeter.engines.membership.likelihood import likelihood_scores
from dosimeter.metrics.membership_rates import found_at

CANDIDATES, DRAWS, RATES = 40, 20_000, (0.001, 0.01, 0.1)


class Mean(nn.Module):
    """Of the positions of a text."""

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return states.mean(1)


def count_claims(seed: int) -> Counter:
    """What is claimed of the candidates of one net, and what of it is right."""
    choice = random.Random(seed)
    torch.manual_seed(seed)
    classes, width, size = choice.choice([2, 5, 10, 20]), choice.choice([8, 16, 32]), choice.choice([1, 2, 4, 8, 12])
    activation, kind = choice.choice([nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid]), choice.choice(["dense", "convolution", "texts"])
    options = {"loss": nn.CrossEntropyLoss(reduction="sum")} if choice.random() < 0.1 else {}
    if kind == "texts":
        layers = [
            nn.Embedding(choice.choice([50, 500]), width),
            nn.Linear(width, 2 * width),
            activation(),
            Mean(),
            nn.Linear(2 * width, classes),
        ]
    elif kind == "dense":
        layers = [nn.Flatten(), nn.Linear(48, width), activation(), nn.Linear(width, width), activation(), nn.Linear(width, classes)]
    else:
        layers = [nn.Conv2d(3, width, 3, padding=1, stride=2), activation(), nn.Flatten(), nn.Linear(4 * width, classes)]
    if choice.random() < 0.1:
        layers.insert(-1, nn.Dropout(0.3))
    inputs, targets = torch.rand(CANDIDATES, 3, 4, 4), torch.randint(0, classes, (CANDIDATES,))
    if choice.random() < 0.3:
        inputs = 0.02 * inputs + 0.5
    if choice.random() < 0.2:
        inputs[20] = inputs[0] + 1e-3 * torch.randn(3, 4, 4)
    if kind == "texts":
        inputs = torch.randint(0, layers[0].num_embeddings, (CANDIDATES, choice.choice([1, 2, 5])))
    try:
        exposure = dm.observe(nn.Sequential(*layers), dm.Batch(inputs[:size], targets[:size]), **options)
        found = dm.test_membership(exposure, dm.Batch(inputs, targets))
    except dm.Refused:
        return Counter({"refused": 1})
    inside = torch.stack([((inputs == inputs[one]).flatten(1).all(1) & (targets == targets[one])) for one in range(size)]).any(0)
    return Counter(
        {
            "decided nets": 1,
            "members": int(inside.sum()),
            "members found": int((found.members & inside).sum()),
            "others": int((~inside).sum()),
            "others excluded": int((found.excluded & ~inside).sum()),
            "false claims": int((found.members & ~inside).sum() + (found.excluded & inside).sum()),
        }
    )


def roc(noise: float, seed: int) -> dict[float, float]:
    """The share of updates with a sample that its likelihood tells, at each share of false alarms among updates without the sample."""
    torch.manual_seed(seed)
    model, rng = nn.Sequential(nn.Flatten(), nn.Linear(48, 20), nn.ReLU(), nn.Linear(20, 12)), torch.Generator().manual_seed(seed)
    gradients = per_sample_gradients(model, torch.rand(1, 3, 4, 4), torch.tensor([3]), dm.CrossEntropy())
    flat = torch.cat([rows.flatten(1) for rows in gradients.values()], 1).double().detach()
    term = flat / flat.norm()  # clipped to a norm of 1
    updates = noise * torch.randn(2, DRAWS, term.shape[1], generator=rng, dtype=torch.float64)
    without, present = (
        torch.stack([likelihood_scores({"all": sent}, {"all": term}, {"all": noise}, 1)[0] for sent in drawn])
        for drawn in (updates[0], updates[1] + term)
    )
    scores, inside = torch.cat((present, without)), torch.arange(2 * DRAWS) < DRAWS
    return {rate: float(found_at(rate, scores, inside, "roc")) for rate in RATES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--record", type=Path, help="the table as a JSON file for docs/results/build.py")
    words = parser.parse_args()
    total = sum((count_claims(seed) for seed in range(words.seed, words.seed + words.nets)), Counter())
    said = "without noise: " + ", ".join(f"{total[name]} {name}" for name in ("decided nets", "refused", "members", "members found"))
    said += ", " + ", ".join(f"{total[name]} {name}" for name in ("others", "others excluded", "false claims"))
    print(said)
    rows = []
    for noise in (0.3, 1.0, 3.0):
        for rate, found in roc(noise, words.seed).items():
            bound = true_positive_bound(rate, noise_multiplier=noise, replaced=False).value
            rows.append([noise, rate, round(found, 4), round(bound, 4)])
            print(*rows[-1])
    if words.record:
        columns = ["noise multiplier", "false alarms", "members found", "at most"]
        write_measurement(words.record, f"{words.seed} to {words.seed + words.nets - 1}", columns, rows, [f"{said[0].upper()}{said[1:]}."])


if __name__ == "__main__":
    main()
