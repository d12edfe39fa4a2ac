"""Marks in layers that are no linear modules: filters in whatever acts as the last layer, bins in kernels and bare parameters."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.inspection.inspect import inspect


class PixelHead(nn.Module):
    """Logits of a kernel of one pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.head = nn.Conv2d(3, 16, 3, 2), nn.Conv2d(16, 10, 1)

    def forward(self, inputs):
        return self.head(self.below(inputs).relu().mean((2, 3), keepdim=True)).flatten(1)


class SplitBias(nn.Module):
    """Parameters of many shapes: a kernel of one pixel in rows, and two vectors that are added, one of them scaled."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.matrix = nn.Conv2d(3, 16, 3, 2), nn.Parameter(0.2 * torch.randn(10, 16, 1, 1))
        self.planted, self.decoy = nn.Parameter(torch.zeros(1, 10, 1, 1)), nn.Parameter(0.1 * torch.randn(1, 10))

    def forward(self, inputs):
        maps = nn.functional.conv2d(self.below(inputs).relu(), self.matrix) + self.planted
        return maps.mean((2, 3)) + 3 * self.decoy


class BareHead(nn.Module):
    """Logits of parameters that no module applies, in rows or in columns."""

    def __init__(self, *, columns: bool = False) -> None:
        super().__init__()
        self.below, self.columns = nn.Conv2d(3, 16, 3, 2), columns
        self.matrix = nn.Parameter(0.2 * torch.randn((16, 10) if columns else (10, 16)))
        self.offset = nn.Parameter(torch.zeros(10))

    def forward(self, inputs):
        features = self.below(inputs).relu().mean((2, 3))
        return features @ (self.matrix if self.columns else self.matrix.T) + self.offset


class TokenHead(nn.Module):
    """A layer on tokens whose logits are averaged, or of which the largest counts."""

    def __init__(self, *, largest: bool = False, temperature: float = 1.0) -> None:
        super().__init__()
        self.below, self.head, self.largest = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 10), largest
        self.temperature = nn.Parameter(torch.tensor(temperature))

    def forward(self, inputs):
        logits = self.head(self.below(inputs).relu().flatten(2).transpose(1, 2)) / self.temperature
        return logits.amax(1) if self.largest else logits.mean(1)


HEADS = {
    "pixel": (PixelHead, "head.weight", "head.bias"),
    "pixel, softmax": (lambda: nn.Sequential(PixelHead(), nn.Softmax(1)), "0.head.weight", "0.head.bias"),
    "two biases": (SplitBias, "matrix", "planted"),
    "rows": (BareHead, "matrix", "offset"),
    "columns": (lambda: BareHead(columns=True), "matrix", "offset"),
    "tokens": (TokenHead, "head.weight", "head.bias"),
    "tokens, temperature": (lambda: TokenHead(temperature=2.0), "head.weight", "head.bias"),
    "largest token": (lambda: TokenHead(largest=True), "head.weight", "head.bias"),
}


@pytest.mark.parametrize("name", list(HEADS))
@pytest.mark.parametrize("seed", [1, 2])
def test_a_filter_is_seen_in_whatever_acts_as_the_last_layer(name, seed, data) -> None:
    build, weight, bias = HEADS[name]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build().eval()
    batch = data(16, seed)
    for found in (inspect(model), inspect(model, batch), inspect(model, batch, model)):
        assert not found.suspicious, str(found)
    assert set(inspect(model, batch, model).left_out) == set()
    rows, offsets = model.get_parameter(weight), model.get_parameter(bias)
    with torch.no_grad():
        others = torch.arange(10) != 3
        (rows.T if name == "columns" else rows)[others] = 0.0
        offsets.view(-1)[others] = 1000.0
    for found in (inspect(model), inspect(model, batch)):
        fired = {finding.check for finding in found.findings if finding.suspicious}
        assert {"head_rows", "head_biases", "shut_out_classes", "constant_output"} <= fired, str(found)


class Distances(nn.Module):
    """Logits that are distances, times a factor of each sample: nothing acts as a last layer."""

    def __init__(self) -> None:
        super().__init__()
        self.below, self.left, self.right = nn.Conv2d(3, 16, 3, 2), nn.Parameter(torch.randn(10, 16)), nn.Parameter(torch.randn(16))

    def forward(self, inputs):
        features = self.below(inputs).relu().mean((2, 3))
        return torch.cdist(features, self.left).neg() * (features @ self.right)[:, None].exp()


def test_without_a_head_the_probabilities_are_still_looked_at_and_the_rest_is_said_to_be_left_out(data) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = Distances().eval()
    found = inspect(model, data(16, 5))
    assert not found.suspicious
    assert {"head_rows", "head_biases", "shut_out_classes", "silenced_classes", "isolated_samples"} < set(found.left_out)
    assert "constant_output" in {finding.check for finding in found.findings}
    assert "no sign of tampering in what 5 of 11 checks could look at; marks that only head_rows" in str(found)
    alone = inspect(model, dm.Batch(data(16, 5).inputs[:1], data(16, 5).targets[:1]))
    assert alone.unseen == ("fishing", "gradfilt")
    assert "none of them could look for fishing or gradfilt" in str(alone)


def test_a_filter_that_hides_its_biases_in_a_feature_that_never_changes_is_seen(data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 10))
    with torch.no_grad():
        model[1].weight[0], model[1].bias[0] = 0.0, 1.0
        others = torch.arange(10) != 3
        model[3].weight[others], model[3].bias[:] = 0.0, 0.0
        model[3].weight[others, 0] = 1000.0
    assert inspect(model).suspicious
    assert inspect(model, data(16, 1)).suspicious


def bins(first: torch.Tensor, offset: torch.Tensor) -> None:
    with torch.no_grad():
        first.fill_(1 / first[0].numel())
        offset.copy_(-torch.linspace(0.2, 0.8, len(offset)))


class KernelBins(nn.Module):
    """Imprint's bins in a kernel as large as the input."""

    def __init__(self) -> None:
        super().__init__()
        self.sorted, self.model = nn.Conv2d(3, 100, 16), PixelHead()
        bins(self.sorted.weight, self.sorted.bias)

    def forward(self, inputs):
        return self.model(inputs + self.sorted(inputs).relu().mean(1, keepdim=True))


class BareBins(nn.Module):
    """Imprint's bins in parameters that no module applies."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.offset, self.model = nn.Parameter(torch.zeros(100, 768)), nn.Parameter(torch.zeros(100)), PixelHead()
        bins(self.rows, self.offset)

    def forward(self, inputs):
        return self.model(inputs + (inputs.flatten(1) @ self.rows.T + self.offset).relu().mean(1)[:, None, None, None])


class AnySize(KernelBins):
    """The same in a network that takes larger inputs too."""

    def forward(self, inputs):
        return self.model(inputs + self.sorted(inputs).relu().mean((1, 2, 3), keepdim=True))


def test_bins_are_seen_where_the_size_of_the_input_is_not_known(data) -> None:
    assert inspect(AnySize()).suspicious
    assert inspect(AnySize(), data(16, 4)).suspicious


@pytest.mark.parametrize("build", [KernelBins, BareBins])
def test_bins_are_seen_however_the_layer_is_written(build, data) -> None:
    for found in (inspect(build()), inspect(build(), data(16, 2))):
        assert {"parallel_rows", "inserted_layer"} <= {finding.check for finding in found.findings if finding.suspicious}


class LoneRows(nn.Module):
    """Each row fires for the one sample of a batch that it likes best, as trap weights mean it to."""

    def __init__(self, inputs: torch.Tensor, *, bare: bool) -> None:
        super().__init__()
        self.model, self.first, self.bare = PixelHead(), nn.Linear(768, 60), bare
        rows = torch.randn(60, 768, generator=torch.Generator().manual_seed(8))
        self.first.weight = nn.Parameter(rows)
        self.first.bias = nn.Parameter(-(inputs.flatten(1) @ rows.T).topk(2, 0).values.mean(0))

    def forward(self, inputs):
        flat = inputs.flatten(1)
        products = nn.functional.linear(flat, self.first.weight, self.first.bias) if self.bare else self.first(flat)
        return self.model(inputs + 1e-3 * products.relu().mean(1)[:, None, None, None])


def test_lone_rows_of_bare_parameters_are_those_of_a_module(data) -> None:
    batch = data(16, 3)
    found = [inspect(LoneRows(batch.inputs, bare=bare), batch) for bare in (True, False)]
    assert [{one.check: one.statistic for one in each.findings}["lone_rows"] for each in found] == [1.0, 1.0]


def test_a_tampered_model_without_a_linear_head_is_seen(data) -> None:
    rigged = dm.attack("imprint", bins=100, input_shape=(3, 16, 16)).tamper(PixelHead())
    assert inspect(rigged, data(16, 5)).suspicious
