"""Hooks of the user's own: gone where the model computes the same without them, kept and named where it does not."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from dosimeter.network.hooks import without_user_hooks


@pytest.fixture
def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))


@pytest.fixture
def inputs() -> torch.Tensor:
    return torch.rand(2, 1, 2, 3, generator=torch.Generator().manual_seed(1))


def hooks_of(model: nn.Module) -> int:
    kinds = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks", "_state_dict_hooks", "_state_dict_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def test_a_model_without_hooks_is_given_back_as_it_is(model, inputs):
    assert without_user_hooks(model, inputs) == (model, [])


def test_hooks_that_only_look_are_removed_and_the_users_model_keeps_them(model, inputs):
    seen = []
    model[1].register_forward_hook(lambda module, arguments, output: seen.append(arguments))
    model[1].register_forward_pre_hook(lambda module, arguments, keywords: None, with_kwargs=True)
    model[3].register_full_backward_hook(lambda module, given, received: seen.append(received))
    model.register_state_dict_pre_hook(lambda *_: None)
    bare, needed = without_user_hooks(model, inputs)
    assert (hooks_of(bare), hooks_of(model), needed) == (0, 4, [])
    assert not bare[1]._forward_pre_hooks_with_kwargs
    seen.clear()
    assert torch.equal(bare(inputs), model(inputs))
    assert len(seen) == 1  # of the user's model alone


def test_a_hook_that_changes_the_output_or_the_gradient_stays_and_is_named(model, inputs):
    model[1].register_forward_hook(lambda module, arguments, output: output * 2)
    model[3].register_full_backward_pre_hook(lambda module, given: (given[0] * 3,))
    model[2].register_forward_hook(lambda module, arguments, output: None)
    lean, needed = without_user_hooks(model, inputs)
    assert (hooks_of(lean), needed) == (2, ["1", "3"])
    assert torch.equal(lean(inputs), model(inputs))


def test_hooks_of_torch_itself_stay(model, inputs):
    nn.utils.spectral_norm(model[1])
    prune.l1_unstructured(model[3], "weight", amount=0.5)
    bare, needed = without_user_hooks(model, inputs)
    assert bare is model
    assert needed == []
    of_torch = hooks_of(model)
    model[1].register_forward_hook(print_nothing)
    bare, needed = without_user_hooks(model, inputs)
    assert (hooks_of(bare), needed) == (of_torch, [])


def print_nothing(*_):
    return None
