"""The statistic above which each check is suspicious; `benchmarks/inspect_thresholds.py` measures the thresholds on honest models."""

from __future__ import annotations

import math

THRESHOLDS = {
    "head_rows": 12.0,
    "head_biases": 12.0,
    "shut_out_classes": 8.0,  # a class with one sample in 1,000 lies log(1000) = 6.9 below the others
    "constant_output": 8.5,
    "silenced_classes": 0.8,
    "parallel_rows": 0.3,
    "trap_rows": 3.0,
    "inserted_layer": 0.9,
    "lone_rows": 0.5,
    "previous_round": 0.6,
    "isolated_samples": math.inf,  # reported, never suspicious
}
HONEST_MODELS = 2060  # tried after the thresholds were set, some of architectures that set none of them
FALSE_ALARMS = 2  # among them; both models were pruned
