"""What passes through a model's modules, against a forward pass by hand; the model stays as it was."""

import copy
import pickle

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.network.probing import (
    FAILED_MODEL,
    InputWatch,
    change_input,
    change_output,
    copied_buffers,
    evaluation_mode,
    input_of,
    is_leaf,
    output_of,
    outputs_with,
    record_calls,
    record_inputs,
)


def normed(seed: int = 0) -> nn.Sequential:
    """A network in train mode whose batch norm and dropout tell the modes apart."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Sequential(nn.ReLU(), nn.Dropout(0.5)), nn.Linear(5, 3))


INPUTS = torch.rand(4, 6, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def untouched():
    """A model in train mode; afterwards its mode, buffers, hooks and gradients must be what they were."""
    model = normed()
    before = copy.deepcopy(model.state_dict())
    yield model
    assert all(module.training for module in model.modules())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_output_is_the_models_own_in_its_mode(untouched) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        found = output_of(untouched, INPUTS)
    twin = copy.deepcopy(untouched)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        assert torch.equal(found, twin(INPUTS))
    assert not torch.equal(twin[1].running_mean, untouched[1].running_mean)
    assert not found.requires_grad


def test_calls_end_in_order_with_what_each_module_received_and_gave(untouched) -> None:
    output, calls = record_calls(untouched, INPUTS, lambda *_: True, evaluate=True)
    twin = copy.deepcopy(untouched).eval()
    hidden = twin[1](twin[0](INPUTS))
    assert [call.name for call in calls] == ["0", "1", "2.0", "2.1", "2", "3", ""]
    assert torch.equal(calls[2].received, hidden)
    assert torch.equal(calls[2].given, hidden.relu())
    assert calls[5].module is untouched[3]
    assert torch.equal(calls[5].given, output)
    assert torch.equal(output, twin(INPUTS))
    assert not output.requires_grad


def test_leaves_alone_are_recorded_where_they_alone_are_selected(untouched) -> None:
    _, calls = record_calls(untouched, INPUTS, is_leaf)
    assert [call.name for call in calls] == ["0", "1", "2.0", "2.1", "3"]


def test_inputs_come_in_the_order_in_which_modules_begin(untouched) -> None:
    with evaluation_mode(untouched):
        _, received = record_inputs(untouched, INPUTS, lambda *_: True)
    assert [name for name, _, _ in received] == ["", "0", "1", "2", "2.0", "2.1", "3"]
    assert torch.equal(received[0][2], INPUTS)


def test_an_output_that_is_no_tensor_is_not_recorded() -> None:
    class Pair(nn.Module):
        def forward(self, inputs):
            return inputs, inputs

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair, self.linear = Pair(), nn.Linear(6, 2)

        def forward(self, inputs):
            return self.linear(self.pair(inputs)[0])

    _, calls = record_calls(Halves(), INPUTS, lambda *_: True)
    assert [call.name for call in calls] == ["linear", ""]


def test_the_input_of_a_module_is_differentiable_where_asked(untouched) -> None:
    leaf = INPUTS.clone().requires_grad_()
    with evaluation_mode(untouched):
        plain, traced = input_of(untouched, "1", leaf), input_of(untouched, "1", leaf, differentiable=True)
    assert torch.equal(plain, traced)
    assert not plain.requires_grad
    (slope,) = torch.autograd.grad(traced.sum(), leaf)
    assert torch.allclose(slope, untouched[0].weight.sum(0).expand(4, -1))


def test_an_output_can_be_differentiated_by_a_modules_own(untouched) -> None:
    with evaluation_mode(untouched), torch.no_grad():
        output, products = outputs_with(untouched, "2", INPUTS)
    (slope,) = torch.autograd.grad(output.sum(), products)
    assert torch.allclose(slope, untouched[3].weight.sum(0).expand(4, -1))


def test_a_pass_that_fails_leaves_no_hook_and_no_mode_behind(untouched) -> None:
    with pytest.raises(RuntimeError):
        record_calls(untouched, torch.rand(4, 7), is_leaf, evaluate=True)
    with pytest.raises(RuntimeError):
        input_of(untouched, "3", torch.rand(4, 7))


def test_a_watch_sees_each_pass_anew_and_writes_into_copies() -> None:
    model = normed()
    watch, parameters = InputWatch(copy.deepcopy(model), ["1", "3"]), dict(model.named_parameters())
    buffers = copied_buffers(model)
    for inputs in (INPUTS, INPUTS.flip(1)):
        seen = watch(parameters, buffers, inputs)
        assert set(seen) == {"1", "3"}
        assert torch.equal(seen["1"], model[0](inputs))
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())
    assert not watch.received


def double_input(_, arguments):
    return (2 * arguments[0],)


def negate(_, __, output):
    return -output


def test_a_changed_input_or_output_is_part_of_the_model_and_of_its_copies() -> None:
    model = nn.Sequential(nn.Linear(6, 3, bias=False))
    expected = -2 * model(INPUTS)
    change_input(model[0], double_input)
    change_output(model[0], negate)
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.allclose(one(INPUTS), expected)
    assert torch.equal(input_of(model, "0", INPUTS), 2 * INPUTS)


class Failing(nn.Linear):
    """Fails in every pass after the first ones."""

    def __init__(self, error: BaseException, passes: int) -> None:
        super().__init__(6, 3)
        self.error, self.passes = error, passes

    def forward(self, input):
        self.passes -= 1
        if self.passes < 0:
            raise self.error
        return super().forward(input)


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (KeyError("x"), ValueError, r"model: its own code failed \(KeyError: 'x'\)"),
        (StopIteration(), ValueError, r"model: its own code failed \(StopIteration\)"),
        (RecursionError("deep"), ValueError, r"model: its own code failed \(RecursionError: deep\)"),
        (GeneratorExit(), ValueError, "model: its own code failed"),
        (SystemExit(0), ValueError, r"model: its own code ended the program \(SystemExit: 0\)"),
        (NotImplementedError("kernel"), NotImplementedError, "kernel"),
        (MemoryError(), MemoryError, ""),
        (KeyboardInterrupt(), KeyboardInterrupt, ""),
    ],
)
def test_whatever_a_models_own_code_raises_is_told_apart(error, raised, said):
    with pytest.raises(raised, match=said) as caught:
        output_of(Failing(error, 0), INPUTS)
    assert (FAILED_MODEL in getattr(caught.value, "__notes__", ())) is (raised is NotImplementedError)


@pytest.mark.parametrize("passes", range(8))
def test_a_model_that_fails_later_is_refused_in_a_sentence(passes):
    batch = dm.Batch(INPUTS, torch.tensor([0, 1, 2, 1]))
    for begin in (
        lambda model: dm.inspect(model, batch=batch),
        lambda model: dm.audit(model.train(), batch, auxiliary=batch, labels=["idlg"], attacks=[], features=[], maps=[]),
    ):
        try:
            begin(Failing(KeyError("later"), passes))
        except ValueError as error:
            assert "later" in str(error)  # noqa: PT017 (late enough, the calls succeed)
