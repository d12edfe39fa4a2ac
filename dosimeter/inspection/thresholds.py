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
HONEST_MODELS = 890  # that the thresholds were tried on after they were set: seeds 851 (unseen architectures) and 852
FALSE_ALARMS = 1  # among them: a network of two classes, one step of Adam after a zero head; `trap_rows` has learnt of it since
