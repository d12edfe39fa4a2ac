"""Gradient Bridge: labels from a hidden layer with the head withheld."""

from collections import Counter
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from dosimeter.client.losses import CrossEntropy, Focal
from dosimeter.client.observe import observe
from dosimeter.interfaces import Exposure
from dosimeter.labels.gradient_bridge import _constant_direction, _from_kept_entries
from dosimeter.runs.server import recover_labels
from dosimeter.types import Batch, Outcome, Refused

LABELS = [0, 0, 0, 3, 3, 8, 9, 9]
pytestmark = pytest.mark.filterwarnings("ignore:inputs reach")


def stack(bias: bool, positive: bool, widths: tuple[int, ...] = (32, 128, 64, 10)) -> nn.Module:
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for width, following in pairwise(widths):
        layers += [nn.Linear(width, following, bias=bias), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).eval()
    if positive:
        for layer in model[2::2]:
            nn.init.uniform_(layer.weight, 0.01, 0.2)
            if bias:
                nn.init.zeros_(layer.bias)
    return model


def withheld(exposure: Exposure, *names: str) -> Exposure:
    return replace(exposure, update={key: value for key, value in exposure.update.items() if not key.startswith(names)})


def overlap(first: Tensor, second: list[int]) -> float:
    return sum((Counter(first.tolist()) & Counter(second)).values()) / len(second)


def test_a_bias_gradient_of_ever_active_units_gives_the_logit_gradient_exactly(expose, inputs):
    model = stack(True, True)
    exposure = expose(LABELS, model=model, auxiliary_per_class=20)
    found = recover_labels(withheld(exposure, "4."), "gradient_bridge").details["logit_gradient"]
    truth = CrossEntropy().logit_gradient(model(inputs(8)), torch.tensor(LABELS)).mean(0).detach()
    assert torch.allclose(found.float(), truth, atol=1e-5)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("loss", [CrossEntropy(), Focal(), CrossEntropy(smoothing=0.1)])
def test_most_labels_come_back_from_the_penultimate_layer(expose, bias, loss):
    exposure = expose(LABELS, model=stack(bias, True), loss=loss, auxiliary_per_class=20)
    assert overlap(recover_labels(withheld(exposure, "4."), "gradient_bridge").labels, LABELS) >= 0.85


def test_rows_with_pruned_entries_tell_their_gradient_by_those_that_are_left():
    rng = torch.Generator().manual_seed(0)
    inputs, gradient = torch.rand(12, generator=rng, dtype=torch.float64), torch.randn(8, generator=rng, dtype=torch.float64)
    rows = torch.outer(gradient, inputs)
    sparse = torch.where(torch.rand(8, 12, generator=rng) < 0.3, rows, 0)
    sparse[5] = 0
    assert torch.allclose(_from_kept_entries(rows, inputs), gradient)
    assert torch.allclose(_from_kept_entries(sparse, inputs), gradient.index_fill(0, torch.tensor([5]), 0))


def test_a_pruned_bias_gradient_does_not_count_as_zero(expose):
    found, published = [], []
    for seed in range(8):
        exposure = expose(LABELS, model=stack(True, True), auxiliary_per_class=20, seed=seed)
        update = {name: change * (change.abs() >= change.abs().quantile(0.9)) for name, change in exposure.update.items()}
        pruned = withheld(replace(exposure, update=update), "4.")
        found.append(overlap(recover_labels(pruned, "gradient_bridge").labels, LABELS))
        published.append(overlap(recover_labels(pruned, "gradient_bridge", as_published=True).labels, LABELS))
    assert sum(found) >= sum(published)


def test_the_constant_direction_is_exact_where_an_input_is_constant():
    inputs = torch.rand(50, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    inputs[:, 3] = 2.0
    fresh = torch.rand(30, 12, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    fresh[:, 3] = 2.0
    assert torch.allclose(fresh @ _constant_direction(inputs), torch.ones(30, dtype=torch.float64), atol=1e-5)


def test_without_a_bias_gradient_the_constant_direction_beats_the_published_division(inputs):
    """Samples of different brightness: the mean activation fits none of them, a direction of constant product fits all."""
    errors = {True: 0.0, False: 0.0}
    truth = torch.bincount(torch.tensor(LABELS), minlength=10)
    for seed in range(5):
        private, own = (inputs(n, s) * (0.2 + 2 * inputs(n, s + 7)[:, :1]) for n, s in ((8, seed), (400, seed + 100)))
        exposure = observe(stack(True, True), Batch(private, torch.tensor(LABELS)), auxiliary=Batch(own, torch.arange(400) % 10))
        for published in errors:
            found = recover_labels(withheld(exposure, "4.", "2.bias"), "gradient_bridge", as_published=published)
            errors[published] += float((found.scores - truth).abs().sum())
    assert errors[False] < 0.5 * errors[True]


def test_deeper_layers_and_dummies_serve_too(expose):
    exposure = expose(LABELS, model=stack(True, False), auxiliary_per_class=20)
    deep = recover_labels(withheld(exposure, "2.", "4."), "gradient_bridge")
    assert overlap(deep.labels, LABELS) >= 0.6
    named = recover_labels(exposure, "gradient_bridge", layer="0")
    assert torch.equal(named.counts, deep.counts)
    assert recover_labels(exposure, "gradient_bridge", source="dummy").counts.sum() == 8


def test_a_convolution_with_one_output_position_is_a_linear_layer(inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 64, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)).eval()
    exposure = observe(
        model,
        Batch(inputs(8).reshape(8, 2, 4, 4), torch.tensor(LABELS)),
        auxiliary=Batch(inputs(100, 1).reshape(100, 2, 4, 4), torch.arange(100) % 10),
    )
    assert overlap(recover_labels(withheld(exposure, "3."), "gradient_bridge").labels, LABELS) >= 0.85


@pytest.mark.parametrize("layer", [nn.Conv2d(2, 64, 1, stride=4, bias=False), nn.Conv2d(2, 64, 3, stride=4, padding=1, bias=False)])
def test_a_convolution_that_sees_a_part_of_its_input_is_read_by_that_part(inputs, layer):
    """As the strided shortcut of a residual network, or a kernel that reaches over the edge."""
    torch.manual_seed(0)
    with torch.no_grad():
        layer.weight.uniform_(0.01, 0.2)
    model = nn.Sequential(layer, nn.ReLU(), nn.Flatten(), nn.Linear(64, 10)).eval()
    batch = Batch(inputs(8).reshape(8, 2, 4, 4).abs(), torch.tensor(LABELS))
    auxiliary = Batch(inputs(100, 1).reshape(100, 2, 4, 4).abs(), torch.arange(100) % 10)
    exposure = observe(model, batch, auxiliary=auxiliary)
    assert overlap(recover_labels(withheld(exposure, "3."), "gradient_bridge").labels, LABELS) >= 0.6


def test_more_classes_than_features_leave_the_logit_gradient_undetermined_and_say_so(expose):
    exposure = expose(LABELS, classes=20, model=stack(True, False, (32, 16, 20)))
    estimate = recover_labels(withheld(exposure, "2."), "gradient_bridge")
    assert estimate.outcome is Outcome.SINGULAR
    assert "20 classes on 16 features" in estimate.message
    assert estimate.counts.sum() == 8


def test_what_cannot_be_bridged_is_refused(expose):
    exposure = expose(LABELS, model=stack(True, False))
    with pytest.raises(Refused, match="the client withholds 0, the client withholds 2"):
        recover_labels(withheld(exposure, "0.w", "2.w"), "gradient_bridge")
    with pytest.raises(Refused, match="got 'nowhere'"):
        recover_labels(exposure, "gradient_bridge", layer="nowhere")
    with pytest.raises(Refused, match="nothing of the kind"):
        recover_labels(expose(LABELS, activation=nn.Tanh), "gradient_bridge")


def test_a_convolution_with_many_output_positions_is_no_link():
    model = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 10)).eval()
    exposure = observe(model, Batch(torch.rand(4, 1, 8, 8), torch.arange(4)))
    with pytest.raises(Refused, match="nothing of the kind stands before it"):
        recover_labels(exposure, "gradient_bridge")
