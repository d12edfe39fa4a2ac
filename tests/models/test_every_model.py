"""Laws that hold for every registered architecture: its head is found, it can be observed, and gradients of gradients exist."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad
from torch.nn.functional import cross_entropy, one_hot

from dosimeter.client.observe import observe
from dosimeter.network.head import find_head, locate_head
from dosimeter.options import OptionError, PositiveInt
from dosimeter.registry import MODELS, options_of
from dosimeter.types import Batch

SMALLEST = {"lenet5": 16, "alexnet": 16, "convnet": 3} | {f"vgg{layers}": 32 for layers in (11, 13, 16, 19)}  # pixels, where not 8
HEADS = {
    "alexnet": "classifier.6",
    "convnet": "linear",
    "fcn3": "fc3",
    "fcn4": "fc4",
    "lenet5": "fc3",
    "lenet_dlg": "fc.0",
    "mlp6": "fc7",
    "mobilenet_v2": "classifier.1",
    "small_cnn": "fc",
}
HEADS |= {f"vgg{layers}": "classifier.6" for layers in (11, 13, 16, 19)}
HEADS |= {f"resnet{layers}": "fc" for layers in (18, 34, 50, 101, 152)}
HEADS |= {f"resnet{layers}": "linear" for layers in (20, 32, 44, 56, 110)}
NARROW = {"hidden": 24, "width": 8}  # where a builder has such an option and its paper's value is thousands
TWICE_DIFFERENTIATED = ("alexnet", "convnet", "fcn3", "lenet5", "lenet_dlg", "resnet18", "resnet20", "small_cnn")
DEEP = [pytest.param(name, marks=pytest.mark.slow) for name in ("mobilenet_v2", "resnet50", "resnet56", "vgg11", "vgg16")]
# Each has a sibling of its family in the default suite.
LONG = {"resnet34", "resnet44", "resnet50", "resnet101", "resnet110", "resnet152", "vgg13", "vgg16", "vgg19"}
OBSERVED = [pytest.param(name, marks=pytest.mark.slow if name in LONG else ()) for name in MODELS.names()]


def small(name: str, **options: Any) -> tuple[nn.Module, int]:
    size = SMALLEST.get(name, 8)
    known = {option.name: option.annotation for option in options_of(MODELS.entry(name))}
    narrow = {key: value for key, value in NARROW.items() if known.get(key) == PositiveInt}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MODELS.build(name, **({"classes": 5, "channels": 2, "size": size} | narrow | options)), size


def images(count: int, size: int) -> Tensor:
    return torch.rand(count, 2, size, size, generator=torch.Generator().manual_seed(3))


def test_every_architecture_of_the_papers_is_there() -> None:
    assert set(HEADS) <= set(MODELS.names())


@pytest.mark.parametrize("name", MODELS.names())
def test_options_are_those_the_pipeline_derives_from_data(name: str) -> None:
    defaults = {option.name: option.default for option in options_of(MODELS.entry(name))}
    assert {key: defaults[key] for key in ("classes", "channels", "size")} == {"classes": 10, "channels": 3, "size": 32}
    assert inspect.Parameter.empty not in defaults.values()
    description = MODELS.entry(name).__doc__ or ""
    assert description.splitlines()[0].endswith(".")
    assert "et al." in description or " and " in description or "Krizhevsky" in description or "Zhang" in description


@pytest.mark.parametrize("name", MODELS.names())
def test_head_is_found_behind_the_features(name: str) -> None:
    model, size = small(name)
    found, non_negative = locate_head(model, (2, size, size))
    assert found == HEADS.get(name, found)
    assert non_negative or name not in HEADS  # all of them have a ReLU or a sigmoid before the head


@pytest.mark.parametrize("name", OBSERVED)
def test_observed_gradients_obey_softmax_in_both_modes(name: str) -> None:
    model, size = small(name)
    batch = Batch(images(4, size), torch.tensor([0, 1, 4, 4]))
    for mode in (True, False):
        exposure = observe(model.train(mode), batch)
        head = find_head(exposure)
        assert head.weight_gradient is not None
        assert head.weight_gradient.shape == head.weight.shape
        # d = softmax - y sums to zero over the classes, so the rows of the head's gradient sum to zero as well.
        scale = float(head.weight_gradient.abs().max())
        assert scale > 0
        assert float(head.weight_gradient.sum(0).abs().max()) < 1e-4 * scale
        if head.bias_gradient is not None:
            with torch.no_grad():
                logits = functional_call(model, {k: v.clone() for k, v in model.named_buffers()}, (batch.inputs,))
            expected = (logits.softmax(1) - one_hot(batch.targets, 5)).mean(0)
            assert torch.allclose(head.bias_gradient, expected, atol=1e-5)
        assert set(exposure.update) == {key for key, _ in model.named_parameters()}


def squared_norm(gradients: Iterable[Tensor]) -> Tensor:
    return torch.stack([(gradient**2).sum() for gradient in gradients]).sum()


@pytest.mark.parametrize("name", [*TWICE_DIFFERENTIATED, *DEEP])
def test_second_derivatives_agree_with_finite_differences_and_with_torch_func(name: str) -> None:
    model, size = small(name, activation="tanh")  # finite differences would see the kinks of a ReLU
    model.double().eval()
    inputs, targets = images(2, size).double(), torch.tensor([1, 3])
    parameters = {key: parameter.detach() for key, parameter in model.named_parameters()}

    def eager(x: Tensor) -> Tensor:
        loss = cross_entropy(model(x), targets)
        return squared_norm(torch.autograd.grad(loss, list(model.parameters()), create_graph=True))

    def functional(x: Tensor) -> Tensor:
        return squared_norm(grad(lambda p: cross_entropy(functional_call(model, p, (x,)), targets))(parameters).values())

    leaf = inputs.clone().requires_grad_()
    (slope,) = torch.autograd.grad(eager(leaf), leaf)
    assert torch.allclose(grad(functional)(inputs), slope, rtol=1e-9, atol=1e-12 * float(slope.abs().max()))
    step = 1e-4 * slope / slope.norm()
    difference = (eager(inputs + step) - eager(inputs - step)).detach() / 2e-4
    assert float(difference) == pytest.approx(float(slope.norm()), rel=1e-4, abs=0)


@pytest.mark.parametrize("name", ["alexnet", "convnet", "mobilenet_v2", "resnet18", "resnet50", "resnet20", "vgg11"])
def test_published_activations_allow_double_backward_in_train_mode(name: str) -> None:
    model, size = small(name)
    inputs = images(3, size).requires_grad_()
    loss = cross_entropy(model.train()(inputs), torch.tensor([0, 1, 2]))
    first = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (second,) = torch.autograd.grad(squared_norm(first), inputs)
    assert bool(torch.isfinite(second).all())
    assert float(second.abs().max()) > 0


@pytest.mark.parametrize("name", sorted(SMALLEST))
def test_inputs_that_pooling_would_shrink_to_nothing_are_refused(name: str) -> None:
    least = SMALLEST[name]
    with pytest.raises(OptionError, match=rf"model\.size: expected at least {least} pixels, got {least - 1}"):
        MODELS.build(name, size=least - 1)


def test_unknown_choices_are_refused_by_name() -> None:
    with pytest.raises(OptionError, match=r"model\.activation: expected one of 'relu'.*got 'gelu'"):
        MODELS.build("lenet5", activation="gelu")
    with pytest.raises(OptionError, match="did you mean 'classes'"):
        MODELS.build("resnet18", clases=10)
    with pytest.raises(OptionError, match=r"no model named 'resnet19'"):
        MODELS.build("resnet19")
