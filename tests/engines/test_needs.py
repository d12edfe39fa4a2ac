"""Every need that a threat model may leave open: refused with the need's name where it is, and passed where it is not."""

from dataclasses import dataclass, replace
from typing import ClassVar

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.needs import check_needs, check_possible
from dosimeter.interfaces import Exposure, Method
from dosimeter.types import Impossible, Knowledge, LabelEstimate, Refused

LABELS = LabelEstimate(counts=torch.tensor([1, 1]), labels=torch.tensor([0, 1]))


def method_that_needs(*needs: Knowledge, partial: bool = False) -> Method:
    @dataclass(frozen=True, kw_only=True)
    class Needy(Method):
        name: ClassVar[str] = "needy"
        partial_labels: ClassVar[bool] = partial

    Needy.needs = frozenset(needs)
    return Needy()


@pytest.fixture
def granted(classifier, batch) -> Exposure:
    """One sample, everything declared and sent, auxiliary data and candidates."""
    exposure = dm.observe(classifier, dm.Batch(batch.inputs[:1], batch.targets[:1]), auxiliary=batch)
    return replace(exposure, candidates=batch)


def without(exposure: Exposure, *names: str) -> Exposure:
    return replace(exposure, update={name: change for name, change in exposure.update.items() if name not in names})


def with_public(exposure: Exposure, **changes) -> Exposure:
    return replace(exposure, public=replace(exposure.public, **changes))


def test_a_frozen_head_is_not_called_withheld(classifier, batch):
    classifier[5].requires_grad_(False)
    exposure = dm.observe(classifier, batch)
    with pytest.raises(Refused, match="needy needs the head gradient: the last layer is frozen"):
        check_needs(method_that_needs(Knowledge.HEAD_GRADIENT), exposure, None)
    with pytest.raises(Refused, match="needy needs the head bias gradient: it is frozen"):
        check_needs(method_that_needs(Knowledge.BIAS_GRADIENT), exposure, None)
    for recover, method in ((dm.recover_labels, "ilrg"), (dm.recover_features, "quotient")):
        with pytest.raises(Refused) as refusal:
            recover(exposure, method)
        assert "withh" not in str(refusal.value)


def test_a_zero_update_is_impossible_where_random_samples_give_it_too(classifier, dead_classifier, batch):
    check_possible(dm.observe(classifier, batch))
    for defenses in ((), ("mixup", dm.defense("clipping", max_norm=1.0))):
        with pytest.raises(Impossible, match="zero in every layer: random samples with random labels give the same zero") as proof:
            check_possible(dm.observe(dead_classifier, batch, defenses=defenses))
        assert proof.value.theorem.endswith("no method can tell the private batch from random ones")


def test_a_zero_update_that_other_batches_do_not_give_is_information(batch):
    """Black images without biases, and labels that a certain model expects: another batch would show."""
    bare = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    black = dm.observe(bare, dm.Batch(torch.zeros_like(batch.inputs), batch.targets))
    certain = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with torch.no_grad():
        certain[1].weight.zero_()
        certain[1].bias.copy_(torch.tensor([500.0] + [0.0] * 9))
    expected = dm.observe(certain, dm.Batch(batch.inputs, torch.zeros_like(batch.targets)))
    for exposure in (black, expected):
        assert not any(bool(change.any()) for change in exposure.update.values())
        with pytest.raises(Refused, match="the zero tells something of the batch") as refusal:
            check_possible(exposure)
        assert not isinstance(refusal.value, Impossible)


@pytest.mark.parametrize("need", Knowledge)
def test_what_is_granted_is_not_refused(granted, need):
    check_needs(method_that_needs(need), granted, LABELS)


@pytest.mark.parametrize(
    ("need", "taken", "phrase"),
    [
        (Knowledge.HEAD_GRADIENT, lambda e: without(e, "5.weight"), "needy needs the head gradient: the client withholds"),
        (Knowledge.BIAS_GRADIENT, lambda e: without(e, "5.bias"), "needs the head bias gradient: the client withholds"),
        (Knowledge.BATCH_SIZE, lambda e: with_public(e, batch_size=None), "needs the batch size"),
        (Knowledge.CANDIDATES, lambda e: replace(e, candidates=None), "needs candidates"),
        (Knowledge.AUXILIARY, lambda e: replace(e, auxiliary=None), "needs auxiliary data"),
        (Knowledge.SINGLE_SAMPLE, lambda e: with_public(e, batch_size=3), "a batch of one: this batch has 3"),
        (Knowledge.SINGLE_SAMPLE, lambda e: with_public(e, batch_size=None), "an unknown number"),
        (Knowledge.SOFTMAX_LOSS, lambda e: with_public(e, loss=dm.BinaryCrossEntropy()), "trains with binary_cross_entropy"),
    ],
)
def test_what_is_not_granted_is_refused_with_its_name(granted, need, taken, phrase):
    with pytest.raises(dm.Refused, match=phrase):
        check_needs(method_that_needs(need), taken(granted), LABELS)
    check_needs(method_that_needs(), taken(granted), LABELS)


def test_labels_are_all_known_or_none_unless_the_method_takes_some(granted):
    some = replace(LABELS, labels=torch.tensor([0, -1]))
    with pytest.raises(dm.Refused, match="every label or none"):
        check_needs(method_that_needs(), granted, some)
    check_needs(method_that_needs(partial=True), granted, some)
    with pytest.raises(dm.Refused, match="needs labels"):
        check_needs(method_that_needs(Knowledge.LABELS), granted, None)


def test_a_head_without_a_bias_has_no_bias_gradient(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10, bias=False))
    with pytest.raises(dm.Refused, match="has no bias"):
        check_needs(method_that_needs(Knowledge.BIAS_GRADIENT), dm.observe(model, batch), None)


@pytest.mark.parametrize("name", ["linear_recursion", "trap_weights", "imprint"])
def test_a_frozen_layer_is_not_called_withheld(name):
    attack = dm.attack(name, **({} if name == "linear_recursion" else {"input_shape": (1, 4, 4)}))
    bias = name != "linear_recursion"  # without biases it needs every layer
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8, bias=bias), nn.ReLU(), nn.Linear(8, 3, bias=bias)).eval()
    sent = model if name == "linear_recursion" else attack.tamper(model)
    layer = "rows" if name == "imprint" else "1"
    batch = dm.Batch(torch.rand(1, 1, 4, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([1]))
    exposure = dm.observe(sent, batch, training=dm.FedAvg(learning_rate=0.1, frozen=(layer,)))
    with pytest.raises(dm.Refused, match="frozen"):
        dm.reconstruct(exposure, attack)
    for parameter in sent.get_submodule(layer).parameters():
        parameter.requires_grad_(False)
    with pytest.raises(dm.Refused, match="frozen"):
        dm.reconstruct(dm.observe(sent, batch), attack)
    whole = dm.observe(sent.requires_grad_(), batch)
    whole.update.pop(f"{layer}.weight")
    with pytest.raises(dm.Refused, match="withholds"):
        dm.reconstruct(whole, attack)


def test_a_zero_update_of_a_regression_has_its_theorem_and_of_a_text_stays_open():
    """Random targets of a regression are numbers. No random texts are drawn, so nothing is said of them."""
    dead = nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.ReLU(), nn.Linear(20, 3, bias=False))
    with torch.no_grad():
        dead[1].bias.fill_(-100)
    regression = dm.observe(dead, dm.Batch(torch.rand(2, 1, 8, 8), torch.randn(2, 3)), loss=nn.MSELoss())
    with pytest.raises(Impossible, match="random samples with random labels give the same zero"):
        check_possible(regression)
    text = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50, bias=False))
    for parameter in text.parameters():
        nn.init.zeros_(parameter)
    exposure = dm.observe(text, dm.Batch(torch.randint(50, (2, 5)), torch.randint(50, (2, 5))))
    with pytest.raises(dm.Refused, match="it is open whether the zero tells anything"):
        check_possible(exposure)
