"""Thresholds as `benchmarks/inspect_thresholds.py` measured them on honest models; run it to measure them anew."""

from __future__ import annotations

import math

THRESHOLDS = {
    "head_rows": 12.0,
    "head_biases": 12.0,
    "shut_out_classes": 8.0,  # a class of one sample in 1,000 lies 6.9 below the others
    "constant_output": 8.5,
    "silenced_classes": 0.8,
    "parallel_rows": 0.3,
    "trap_rows": 3.0,
    "inserted_layer": 0.9,
    "lone_rows": 0.5,
    "previous_round": 0.6,
    "isolated_samples": math.inf,  # said, never held against a model
}
HONEST_MODELS = 2060  # tried after the thresholds were set: seeds 871, 872, 874, 882 (unseen architectures), 873, 875, 881
FALSE_ALARMS = 2  # among them, seeds 871 and 873, both pruned; `parallel_rows` has learnt of one; of the other's 100 rows 48 were left
