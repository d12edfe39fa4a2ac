"""Models whose gradients are hard to differentiate again: attention, half precision, inputs that are cut off."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, linear, scaled_dot_product_attention

import dosimeter as dm
from dosimeter.artefacts import save_checkpoints
from dosimeter.engines.matching.choice import OneByOne
from dosimeter.engines.matching.differentiable import twice_differentiable
from dosimeter.engines.matching.distances import SquaredError
from dosimeter.engines.matching.objective import Objective, Terms
from dosimeter.engines.matching.optimisers import Adam
from dosimeter.engines.matching.paths import Eager, Evaluator, Functional
from dosimeter.engines.matching.problem import in_one_precision
from dosimeter.engines.matching.recipe import Recipe
from dosimeter.engines.matching.schedules import Rate
from dosimeter.engines.matching.solve import solve

ATTACKS = {"dlg": {"restarts": 2}, "inverting_gradients": {}, "sapag": {}, "stepwise": {}}


class Attention(nn.Module):
    """Eight pixels as tokens, attended to by the fused kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.projections, self.head = nn.Linear(4, 12), nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        parts = self.projections(images.flatten(1).unflatten(1, (8, 4)))[:, None].chunk(3, 3)  # one head: without, nothing is fused
        return self.head(scaled_dot_product_attention(*parts).flatten(1))


class Encoder(nn.Module):
    """A whole encoder layer, which in eval mode has a fused form without any derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), nn.Linear(32, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images.flatten(1).unflatten(1, (8, 4))).flatten(1))


class Cut(nn.Module):
    """A network behind a change of its inputs that has no slope."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.net = kind, nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Sigmoid(), nn.Linear(16, 5))

    def forward(self, images: Tensor) -> Tensor:
        changed = {"detached": images.detach(), "rounded": (images * 255).round() / 255, "kept": images}
        return self.net(changed[self.kind])


def seeded(build, *options) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build(*options).eval()


def batch() -> dm.Batch:
    return dm.Batch(torch.rand(1, 2, 4, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([3]))


@pytest.mark.parametrize("build", [Attention, Encoder])
@pytest.mark.parametrize("attack", ATTACKS)
def test_attention_is_attacked_through_plain_matrix_products(build: type[nn.Module], attack: str) -> None:
    data = batch()
    exposure = dm.observe(seeded(build), data)
    method = dm.attack(attack, steps=60, **ATTACKS[attack])
    found = dm.reconstruct(exposure, method, labels=data.targets)
    elsewhere = method.objective(exposure, found, 1 - data.inputs, data.targets)
    assert found.outcome is dm.Outcome.COMPLETED
    assert elsewhere is not None
    assert found.objective < 0.5 * elsewhere


def plain(model: nn.Module, images: Tensor) -> Tensor:
    """The same networks with attention written out: softmax(Q Kᵀ / √d) V."""
    tokens = images.flatten(1).unflatten(1, (8, 4))
    if isinstance(model, Attention):
        return model.head(attended(*model.projections(tokens).chunk(3, 2)).flatten(1))
    assert isinstance(model, Encoder)
    layer = model.encoder
    projected = linear(tokens, layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias).chunk(3, 2)
    heads = attended(*(part.unflatten(2, (2, 2)).transpose(1, 2) for part in projected)).transpose(1, 2).flatten(2)
    tokens = layer.norm1(tokens + layer.self_attn.out_proj(heads))
    tokens = layer.norm2(tokens + layer.linear2(layer.linear1(tokens).relu()))
    return model.head(tokens.flatten(1))


def attended(queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return (queries @ keys.mT / queries.shape[-1] ** 0.5).softmax(-1) @ values


@pytest.mark.parametrize("build", [Attention, Encoder])
@pytest.mark.parametrize("path", [Eager, Functional])
@pytest.mark.parametrize("restarts", [1, 2])
def test_through_attention_objective_and_slope_are_those_of_attention_written_out(
    build: type[nn.Module], path: type[Evaluator], restarts: int
) -> None:
    model, data = seeded(build).double(), batch()
    exposure = dm.observe(model, dm.Batch(data.inputs.double(), data.targets))
    guesses = torch.rand(restarts, 1, 2, 4, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64, requires_grad=True)
    expected = torch.zeros(())
    for guess in guesses:
        loss = cross_entropy(plain(model, guess), data.targets)
        gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
        expected = expected + sum((g - t).square().sum() for g, t in zip(gradients, exposure.update.values(), strict=True))
    (slope,) = torch.autograd.grad(expected, guesses)
    recipe = Recipe(distance=SquaredError(), optimiser=Adam(), rate=Rate(start=0.1), steps=1, restarts=restarts)
    evaluate = path(Objective(exposure, recipe, data.targets))
    terms = Terms(matching=torch.ones((), dtype=torch.float64), priors=torch.zeros(0, dtype=torch.float64))
    with twice_differentiable():
        if path is Functional and restarts > 1 and build is Encoder:  # side by side PyTorch differentiates its layer norms wrongly
            evaluate = OneByOne(evaluate)
        found = evaluate(guesses.detach(), None, evaluate.objective.names, terms)
    assert torch.allclose(found.objective.sum(), expected, rtol=1e-10)
    assert torch.allclose(found.inputs, slope, rtol=1e-9, atol=1e-10 * float(slope.abs().max()))


def test_the_forms_of_attention_are_put_back() -> None:
    before = torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()
    with twice_differentiable():
        assert not torch.backends.mha.get_fastpath_enabled()
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert (torch.backends.mha.get_fastpath_enabled(), torch.backends.cuda.flash_sdp_enabled()) == before


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_half_precision_model_is_attacked_as_its_update_in_single_precision_would_be(dtype: torch.dtype, tmp_path: Path) -> None:
    model, data = seeded(Cut, "kept"), batch()
    exposure = dm.observe(model.to(dtype), dm.Batch(data.inputs.to(dtype), data.targets))
    wide = in_one_precision(exposure)
    assert {tensor.dtype for tensor in (*wide.model.parameters(), *wide.update.values())} == {torch.float32}
    assert {parameter.dtype for parameter in exposure.model.parameters()} == {dtype}
    with save_checkpoints(tmp_path, every=0):
        found = dm.reconstruct(exposure, "inverting_gradients", labels=data.targets, steps=100)
    expected = dm.reconstruct(wide, "inverting_gradients", labels=data.targets, steps=100)
    assert torch.equal(found.inputs, expected.inputs)
    assert found.objective < 0.1
    assert "replayed in single precision" in found.message
    assert expected.message == ""


@pytest.mark.parametrize("sent", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_an_update_in_another_precision_than_its_model_is_attacked(dtype: torch.dtype, sent: torch.dtype) -> None:
    model, data = seeded(Cut, "kept"), batch()
    update = {name: change.to(sent) for name, change in dm.observe(model, data).update.items()}
    exposure = dm.receive(model.to(dtype), update, input_shape=(2, 4, 4), batch_size=1)
    found = dm.reconstruct(exposure, "dlg", labels=data.targets, steps=60)
    assert found.inputs.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float((found.inputs - data.inputs).abs().max()) < 0.05
    assert ("replayed in single precision" in found.message) == (dtype == torch.float16)


def test_single_and_double_precision_stay_as_they_are() -> None:
    for dtype in (torch.float32, torch.float64):
        exposure = dm.observe(seeded(Cut, "kept").to(dtype), dm.Batch(batch().inputs.to(dtype), batch().targets))
        assert in_one_precision(exposure) is exposure


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("kind", ["detached", "rounded"])
def test_inputs_without_a_slope_are_not_attempted_and_said(kind: str, attack: str) -> None:
    data = batch()
    found = dm.reconstruct(dm.observe(seeded(Cut, kind), data), attack, labels=data.targets, steps=20, **ATTACKS[attack])
    assert found.outcome is dm.Outcome.NOT_ATTEMPTED
    assert "passes no gradient to its inputs" in found.message
    assert dm.reconstruct(dm.observe(seeded(Cut, "kept"), data), attack, labels=data.targets, steps=20).outcome is dm.Outcome.COMPLETED


def test_a_start_at_the_truth_has_no_slope_and_is_attacked_all_the_same() -> None:
    data = batch()
    exposure = dm.observe(seeded(Cut, "kept"), data)
    recipe = Recipe(distance=SquaredError(), optimiser=Adam(), rate=Rate(start=0.1), steps=1)
    labels = dm.LabelEstimate(counts=torch.bincount(data.targets, minlength=5), labels=data.targets)
    found = solve(exposure, labels, torch.Generator().manual_seed(0), recipe, start=data.inputs)
    assert found.outcome is dm.Outcome.COMPLETED
    assert found.objective == 0


class Excited(nn.Module):
    """A squeeze-and-excitation block as MobileNetV3 has it, whose gate is a hardsigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.gate = nn.Conv2d(2, 4, 3, padding=1), nn.Sequential(nn.Linear(4, 4), nn.Hardsigmoid())
        self.head = nn.Linear(4 * 16, 5)

    def forward(self, images: Tensor) -> Tensor:
        maps = nn.functional.hardswish(self.conv(images))
        return self.head((maps * self.gate(maps.mean((2, 3)))[:, :, None, None]).flatten(1))


@pytest.mark.parametrize("attack", ATTACKS)
def test_a_hardsigmoid_is_no_obstacle(attack: str) -> None:
    data = batch()
    found = dm.reconstruct(dm.observe(seeded(Excited), data), attack, labels=data.targets, steps=20, **ATTACKS[attack])
    assert found.outcome is dm.Outcome.COMPLETED
    assert found.objective < float("inf")


def test_ids_of_an_embedding_are_not_attempted_and_said_to_be_in_the_update() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(11, 4), nn.Linear(4, 5)

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embedding(ids.long()).mean(1))

    ids = dm.Batch(torch.tensor([[1.0, 7.0, 3.0]]), torch.tensor([2]))
    exposure = dm.observe(seeded(Words), ids, normalization=dm.Normalization(mean=(0.0,), std=(0.1,)))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=torch.tensor([2]), steps=5)
    assert found.outcome is dm.Outcome.NOT_ATTEMPTED
    assert "the rows of its gradient that are not zero name them" in found.message


class Gated(nn.Module):
    """A network that a first unit switches on where the first pixel is bright."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Flatten(), nn.Linear(32, 16), nn.Sigmoid(), nn.Linear(16, 5))

    def forward(self, images: Tensor) -> Tensor:
        return self.net(images * (images[:, :1, :1, :1] > 0.95))


def test_one_start_with_a_slope_is_enough() -> None:
    data = batch()
    bright = dm.Batch(data.inputs.clone(), data.targets)
    bright.inputs[0, 0, 0, 0] = 1.0
    exposure = dm.observe(seeded(Gated), bright)
    found = dm.reconstruct(exposure, "inverting_gradients", labels=data.targets, start="uniform", steps=2, restarts=1, seed=3)
    assert found.outcome is dm.Outcome.NOT_ATTEMPTED
    found = dm.reconstruct(exposure, "inverting_gradients", labels=data.targets, start="uniform", steps=2, restarts=40, seed=3)
    assert found.outcome is dm.Outcome.COMPLETED


def test_starts_that_the_model_has_no_doubt_of_are_told_from_a_model_without_a_slope() -> None:
    sure = seeded(nn.Sequential, nn.Flatten(), nn.Linear(32, 5))
    for name, number in (("1.weight", 0.01), ("1.bias", 0.0)):
        nn.init.constant_(sure.get_parameter(name), number)
    with torch.no_grad():
        sure.get_parameter("1.bias")[3] = 500.0
    images = batch().inputs
    exposure = dm.observe(sure, dm.Batch(images, torch.tensor([1])))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=torch.tensor([3]), steps=5)
    assert found.outcome is dm.Outcome.NOT_ATTEMPTED
    assert found.message.startswith("the model gives every start its label without any error")
    assert dm.reconstruct(exposure, "inverting_gradients", labels=torch.tensor([1]), steps=5).outcome is dm.Outcome.COMPLETED
