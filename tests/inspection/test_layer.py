"""Linear layers in the forms that a model can write them in."""

import torch
from torch import nn

from dosimeter.inspection.layer import bare_layers, linear_layer, rows_of


def test_modules_and_kernels_give_the_rows_and_what_they_are_multiplied_with(rng):
    images = torch.rand(3, 2, 9, 9, generator=rng)
    for module, received in (
        (nn.Linear(162, 5), images.flatten(1)),
        (nn.Conv2d(2, 5, 9), images),  # as large as its input
    ):
        layer = linear_layer("a.b", module, received)
        assert (layer.name, layer.parameter) == ("a.b", "a.b.weight")
        torch.testing.assert_close(layer.received @ layer.weight.T + layer.bias, module(received).flatten(1), rtol=1e-4, atol=1e-5)
    assert linear_layer("", nn.Linear(4, 2, bias=False), torch.rand(3, 4)).parameter == "weight"


def test_several_tokens_or_patches_are_averaged(rng):
    tokens = torch.rand(3, 6, 4, generator=rng)
    torch.testing.assert_close(linear_layer("", nn.Linear(4, 2), tokens).received, tokens.mean(1))
    images = torch.rand(3, 1, 16, 16, generator=rng)
    patches = linear_layer("", nn.Conv2d(1, 2, 8, stride=8), images)
    torch.testing.assert_close(patches.received[:, 0], images[:, 0, ::8, ::8].mean((1, 2)))
    assert patches.weight.shape == (2, 64)


def test_other_modules_are_no_linear_layers():
    assert linear_layer("", nn.Conv2d(2, 4, 3), torch.rand(3, 2, 9, 9)) is None
    assert linear_layer("", nn.BatchNorm2d(2), torch.rand(3, 2, 9, 9)) is None


class Bare(nn.Module):
    def __init__(self, rows: int, vectors: int) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.rand(6, rows))
        for i in range(vectors):
            self.register_parameter(f"offset{i}", nn.Parameter(torch.rand(rows)))


def test_parameters_that_no_module_applies_are_found_with_the_only_vector_beside_them():
    inputs = torch.rand(4, 1, 2, 3)
    model = Bare(rows=9, vectors=1)
    (layer,) = bare_layers(model, inputs, [])
    assert torch.equal(layer.weight, model.matrix.T)
    assert torch.equal(layer.bias, model.offset0)
    assert torch.equal(layer.received, inputs.flatten(1))
    assert not layer.applied
    assert bare_layers(Bare(rows=9, vectors=2), inputs, [])[0].bias is None
    assert bare_layers(Bare(rows=7, vectors=1), inputs, []) == []
    assert bare_layers(Bare(rows=9, vectors=1), torch.rand(4, 5), []) == []


def test_a_layer_that_is_applied_is_not_found_again():
    model = nn.Sequential(nn.Linear(6, 9))
    inputs = torch.rand(4, 6)
    assert len(bare_layers(model, inputs, [])) == 1
    assert bare_layers(model, inputs, [linear_layer("0", model[0], inputs)]) == []


def test_rows_have_the_width_asked_for():
    assert rows_of(torch.zeros(3, 2, 2), 4).shape == (3, 4)
    assert rows_of(torch.zeros(4, 3), 4).shape == (3, 4)
    assert rows_of(torch.zeros(4), 4) is None
    assert rows_of(torch.zeros(3, 5), 4) is None
