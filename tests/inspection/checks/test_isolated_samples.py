"""How many samples the last layer's gradient would show one by one."""

import pytest
import torch

from dosimeter.client.observe import observe
from dosimeter.inspection.checks.isolated_samples import measure
from dosimeter.inspection.thresholds import THRESHOLDS
from dosimeter.types import Batch


@pytest.mark.parametrize("factor", [1.0, 30.0, 300.0])
def test_the_statistic_is_the_count_that_a_brute_force_gives(perceptron, received, data, factor) -> None:
    model, batch = perceptron(), data(16, 3)
    with torch.no_grad():
        model[3].weight.mul_(factor)
    alone = [observe(model, Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1])).update["3.weight"] for i in range(12)]
    rows = torch.stack([update.double().norm(dim=1) for update in alone])  # (B, C)
    lone = {int(row.argmax()) for row in rows.T if float(row.max()) >= 0.99 * float(row.sum()) and float(row.max()) > 1e-9 * rows.max()}
    assert measure(received(model))[0] == len(lone)


def test_a_confident_head_isolates_samples_and_an_even_one_none(perceptron, received) -> None:
    even, confident = perceptron(), perceptron()
    with torch.no_grad():
        even[3].weight.mul_(0.01)
        confident[3].weight.mul_(1000)
    assert measure(received(even, targets=torch.zeros(12, dtype=torch.long)))[0] == 0
    assert measure(received(confident))[0] > 0


def test_it_is_reported_and_never_suspicious(perceptron, received) -> None:
    assert THRESHOLDS["isolated_samples"] == float("inf")
    assert "your data" in measure(received(perceptron(), with_data=False))
