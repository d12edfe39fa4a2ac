"""R-GAP: exact where each layer's equations suffice, and the rank analysis says where they do not."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import dosimeter as dm


def network(activation: nn.Module, *, bias: bool, logits: int, widths: tuple[int, int] = (6, 8), seed: int = 3) -> nn.Sequential:
    """A convolution that keeps the grid of 8 by 8, one with stride 2, and a linear layer."""
    first, second = widths
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        convolutions = [nn.Conv2d(1, first, 3, 1, 1, bias=bias), activation, nn.Conv2d(first, second, 3, 2, 1, bias=bias), activation]
        return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(16 * second, logits, bias=bias)).eval()


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.activation, self.second = nn.Conv2d(1, 4, 3, padding=1), nn.Tanh(), nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(256, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        maps = self.first(inputs)
        return self.head((maps + self.second(self.activation(maps) + maps)).flatten(1))


def observed(model: nn.Module, digits, index: int = 7) -> tuple[dm.Batch, dm.Exposure]:
    images, labels = digits
    one_logit = model[-1].out_features == 1
    batch = dm.Batch(images[index : index + 1], labels[index : index + 1] % 2 if one_logit else labels[index : index + 1])
    return batch, dm.observe(model, batch, loss=dm.BinaryCrossEntropy() if one_logit else dm.CrossEntropy())


@pytest.mark.parametrize("activation", [nn.LeakyReLU(0.2), nn.Sigmoid(), nn.Tanh(), nn.ELU()], ids=lambda one: type(one).__name__)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("logits", [1, 10])
def test_the_input_comes_back_where_every_layer_has_full_rank(digits, activation, bias, logits):
    batch, exposure = observed(network(activation, bias=bias, logits=logits), digits)
    found = dm.reconstruct(exposure, "rgap", labels=batch.targets)
    assert float((found.inputs - batch.inputs).abs().max()) < 3e-3
    assert found.outcome is dm.Outcome.COMPLETED
    assert found.objective < 1e-3


@pytest.mark.parametrize("bias", [True, False])
def test_the_label_is_found_too(digits, bias):
    batch, exposure = observed(network(nn.Sigmoid(), bias=bias, logits=10), digits)
    found = dm.reconstruct(exposure, "rgap")
    assert float((found.inputs - batch.inputs).abs().max()) < 3e-3
    assert found.labels.argmax(1).tolist() == batch.targets.tolist()


def test_rank_analysis_names_the_layer_that_hides_unknowns(digits):
    """Four filters at stride 2 are too few."""
    batch, exposure = observed(network(nn.LeakyReLU(0.2), bias=True, logits=10, widths=(10, 4)), digits)
    found = dm.reconstruct(exposure, "rgap")
    assert found.outcome is dm.Outcome.PARTIAL
    assert "2: 408 of its input's 640 unknowns are determined" in found.message
    assert found.objective > 1e-2  # of the gradient, which the server computes from what it found
    assert float((found.inputs - batch.inputs).square().mean()) > 1e-3


def test_twin_data_are_named(digits):
    """A net without bias is homogeneous: a brighter image has a larger logit, and two logits have the same product with their slope."""
    images, labels = digits
    batch = dm.Batch(images[3:4] * 0.3, labels[3:4] % 2)  # both twins lie in the range of pixels
    model = network(nn.LeakyReLU(0.2), bias=False, logits=1)
    wanted = 0.8 if batch.targets.item() else -0.8
    with torch.no_grad():
        model[-1].weight *= wanted / float(model(batch.inputs))
    found = dm.reconstruct(dm.observe(model, batch, loss=dm.BinaryCrossEntropy()), "rgap", labels=batch.targets)
    assert found.outcome is dm.Outcome.AMBIGUOUS
    assert "1 other scale of the input explains the gradient as well" in found.message
    factor = float(found.inputs.norm() / batch.inputs.norm())
    assert torch.allclose(found.inputs, factor * batch.inputs, atol=1e-4)
    logit = 0.8 * factor
    assert abs(logit / (1 + math.exp(logit)) - 0.8 / (1 + math.exp(0.8))) < 1e-5


def test_the_zeros_of_a_relu_give_no_output_equations(digits):
    batch, exposure = observed(network(nn.ReLU(), bias=False, logits=10), digits)
    assert float((dm.reconstruct(exposure, "rgap", labels=batch.targets).inputs - batch.inputs).abs().max()) < 1e-3


def test_refusals(digits):
    images, labels = digits
    leaky = network(nn.LeakyReLU(0.2), bias=True, logits=10)
    with pytest.raises(dm.Refused, match="a batch of one"):
        dm.reconstruct(dm.observe(leaky, dm.Batch(images[:2], labels[:2])), "rgap")
    with pytest.raises(dm.Refused, match=r"needs a plain chain of linear layers, convolutions and activations; 'second' is not part"):
        dm.reconstruct(dm.observe(Residual().eval(), dm.Batch(images[:1], labels[:1])), "rgap")
    pooled = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.AvgPool2d(2), nn.Flatten(), nn.Linear(36, 10)).eval()
    with pytest.raises(dm.Refused, match="'2' is not part of one"):
        dm.reconstruct(dm.observe(pooled, dm.Batch(images[:1], labels[:1])), "rgap")
    _, exposure = observed(leaky, digits)
    exposure.update.pop("0.weight")
    with pytest.raises(dm.Refused, match="withholds '0'"):
        dm.reconstruct(exposure, "rgap")
    wide = nn.Sequential(nn.Conv2d(1, 200, 3, padding=1), nn.Tanh(), nn.Conv2d(200, 4, 3), nn.Flatten(), nn.Linear(144, 10)).eval()
    with pytest.raises(dm.Refused, match=r"at most 8,192 unknowns a layer; the input of '2' has 12,800"):
        dm.reconstruct(dm.observe(wide, dm.Batch(images[:1], labels[:1])), "rgap")


@pytest.mark.slow
def test_the_papers_six_layers_on_a_photograph(shared_data):
    """The paper's CNN6: six convolutions with LeakyReLU and one logit, no biases, CIFAR-10."""
    shapes = [(3, 12, 4, 2, 2), (12, 36, 3, 2, 1), (36, 36, 3, 1, 1), (36, 36, 3, 1, 1), (36, 64, 3, 2, 1), (64, 128, 3, 1, 1)]
    with torch.random.fork_rng():
        torch.manual_seed(5)
        layers = [part for shape in shapes for part in (nn.Conv2d(*shape, bias=False), nn.LeakyReLU(0.2))]
        model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3200, 1, bias=False)).eval()
    image = torch.from_numpy(np.load(shared_data / "cifar10.npz")["test_images"][:1]).permute(0, 3, 1, 2).float() / 255
    batch = dm.Batch(image, torch.tensor([1]))
    found = dm.reconstruct(dm.observe(model, batch, loss=dm.BinaryCrossEntropy()), "rgap", labels=batch.targets)
    assert float((found.inputs - image).square().mean()) < 1e-6
