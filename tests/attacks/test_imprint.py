"""Imprint: every lone sample comes back, no mixture is claimed, in both variants, in train mode and over rounds."""

import copy

import pytest
import torch

import dosimeter as dm
from dosimeter.engines.bins.inserted_layer import NATURAL_MOMENTS
from dosimeter.models.loading import load_model


def pictures(count: int, seed: int) -> dm.Batch:
    """Smooth random pictures on 8-bit levels."""
    rng = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, 3, 5, 5, generator=rng)
    inputs = torch.nn.functional.interpolate(coarse, (16, 16), mode="bilinear")
    return dm.Batch((inputs * 255).round() / 255, torch.randint(10, (count,), generator=rng))


def attacked(model, batch: dm.Batch, **options) -> tuple[dm.Reconstruction, torch.Tensor]:
    """What came back, and for each recovered sample the distance to the nearest true one."""
    attack = dm.attack("imprint", input_shape=(3, 16, 16), **options)
    found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
    distance = torch.cdist(found.inputs.double().flatten(1), batch.inputs.double().flatten(1)) / 768**0.5
    return found, distance.min(1).values if len(distance) else distance.new_zeros(0)


@pytest.fixture
def model():
    return load_model("small_cnn", {"size": 16, "width": 4}, None, 3)


@pytest.mark.parametrize("sparse", [False, True])
def test_a_batch_comes_back_whole(model, sparse) -> None:
    batch = pictures(32, 2)
    found, distance = attacked(model, batch, sparse=sparse)
    assert len(found.inputs) == 32
    assert float(distance.max()) < 1e-4
    assert torch.equal(found.labels.sort().values, batch.targets.sort().values)
    assert "nothing is left" in found.message


def test_batch_norm_in_train_mode_does_not_help_the_client() -> None:
    model = load_model("convnet", {"size": 16, "width": 2}, None, 4)
    assert model.training
    found, distance = attacked(model, pictures(24, 2))
    assert len(found.inputs) >= 22
    assert float(distance.max()) < 1e-2


def test_no_mixture_is_claimed_where_bins_are_scarce(model) -> None:
    for seed in range(4):
        found, distance = attacked(model, pictures(40, 10 + seed), bins=30)
        assert (distance < 1e-2).all()
        assert len(found.inputs) < 40


@pytest.mark.parametrize("on_levels", [True, False])
@pytest.mark.parametrize("functionals", [("brightness",), ("brightness", "cosine", "random")])
def test_no_mixture_is_taken_for_a_sample_of_one_of_many_classes(on_levels, functionals) -> None:
    model = load_model("small_cnn", {"size": 16, "width": 4, "classes": 1000}, None, 5)
    for seed in range(3):
        batch = pictures(40, 30 + seed)
        inputs = (
            batch.inputs
            if on_levels
            else (batch.inputs + torch.rand(batch.inputs.shape, generator=torch.Generator().manual_seed(seed)) / 300).clamp(0, 1)
        )
        found, distance = attacked(model, dm.Batch(inputs, batch.targets * 97), functionals=functionals, bins=60)
        assert (distance < 1e-2).all()
        assert len(found.inputs) < 40


@pytest.mark.parametrize("levels", [2, 4, 6])
def test_no_mixture_of_pictures_with_few_levels_is_claimed(model, levels) -> None:
    for seed in range(4):
        batch = pictures(40, 50 + seed)
        inputs = (batch.inputs * (levels - 1)).round() / (levels - 1)
        found, distance = attacked(model, dm.Batch((inputs * 255).round() / 255, batch.targets), bins=60)
        assert (distance < 1e-2).all()
        assert len(found.inputs) >= 1
        found, distance = attacked(model, dm.Batch(inputs, batch.targets))
        assert (distance < 1e-2).all()
        assert len(found.inputs) >= 30


def test_black_samples_are_said_to_be_missing(model) -> None:
    batch = pictures(32, 4)
    batch.inputs[:10] = 0
    found, distance = attacked(model, batch)
    assert len(found.inputs) == 22
    assert float(distance.max()) < 1e-4
    assert found.outcome is dm.Outcome.PARTIAL
    assert "hold more" in found.message


def test_clipped_samples_and_aggregated_gradients_are_not_taken_for_local_steps(model) -> None:
    batch, attack = pictures(32, 5), dm.attack("imprint", input_shape=(3, 16, 16), bins=30)
    for defense in (dm.defense("dpsgd", max_norm=0.1, noise_multiplier=0.0), dm.defense("secure_aggregation", clients=2)):
        found = dm.reconstruct(dm.observe(attack.tamper(model), batch, defenses=[defense]), attack)
        assert "local steps" not in found.message
        assert "rounded" not in found.message


class Encoder(torch.nn.Module):
    """Patches, a stock transformer layer, whose fused form has no derivative along a direction, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = torch.nn.Conv2d(3, 16, 4, 4)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.head = torch.nn.Linear(16, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.patches(inputs).flatten(2).transpose(1, 2)).mean(1))


def test_a_stock_transformer_layer_is_no_obstacle() -> None:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        encoder = Encoder().eval()
    batch = pictures(16, 6)
    found, distance = attacked(encoder, batch)
    assert len(found.inputs) == 16
    assert float(distance.max()) < 1e-4
    assert torch.equal(found.labels.sort().values, batch.targets.sort().values)


class Opaque(torch.autograd.Function):
    """The identity, without a derivative along a direction."""

    @staticmethod
    def forward(ctx, inputs):
        return inputs.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def test_a_model_without_derivatives_along_a_direction_is_read_by_levels_and_agreement(model) -> None:
    class Wrapped(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = model

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return self.body(Opaque.apply(inputs))

    found, distance = attacked(Wrapped(), pictures(16, 7))
    assert len(found.inputs) == 16
    assert float(distance.max()) < 1e-4
    assert (found.labels == -1).all()


def test_one_functional_finds_about_as_many_as_lie_alone(model) -> None:
    batch = pictures(30, 3)
    found, distance = attacked(model, batch, functionals=("brightness",), bins=60)
    mean, deviation = NATURAL_MOMENTS["brightness"]
    brightness = (batch.inputs.flatten(1).mean(1) - mean) / deviation
    edges = torch.special.ndtri(torch.arange(1, 60) / 60)
    bins = torch.bucketize(brightness, edges)
    alone = int((torch.bincount(bins, minlength=60) == 1).sum())
    assert (distance < 1e-3).all()
    assert alone - 3 <= len(found.inputs) <= alone


def test_a_second_round_sorts_anew_and_learns_the_kind_of_data(model) -> None:
    batch = pictures(40, 5)
    first = dm.attack("imprint", input_shape=(3, 16, 16), bins=40)
    found = dm.reconstruct(dm.observe(first.tamper(model), batch), first)
    second = first.after(found)
    assert second.round == 1
    assert not torch.equal(first.tamper(model).rows.bias, second.tamper(model).rows.bias)
    if len(found.inputs) > 1:
        mean, _ = second.moments["brightness"]
        assert mean == pytest.approx(float(found.inputs.mean()), abs=1e-6)


def test_normalised_inputs_are_sorted_by_their_pixels(model) -> None:
    normalization = dm.Normalization(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    batch = pictures(16, 6)
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (normalization.mean, normalization.std))
    scaled = dm.Batch((batch.inputs - mean) / std, batch.targets)
    attack = dm.attack("imprint", input_shape=(3, 16, 16), normalization=normalization)
    found = dm.reconstruct(dm.observe(attack.tamper(model), scaled, normalization=normalization), attack)
    assert len(found.inputs) == 16
    assert float(torch.cdist(found.inputs.flatten(1), scaled.inputs.flatten(1)).min(1).values.max()) < 1e-2


def test_secure_aggregation_leaves_the_samples_of_all_clients(model) -> None:
    batch = pictures(24, 7)
    attack = dm.attack("imprint", input_shape=(3, 16, 16))
    exposure = dm.observe(attack.tamper(model), batch, defenses=(dm.defense("secure_aggregation", clients=3),))
    assert len(dm.reconstruct(exposure, attack).inputs) == 24


def test_tampering_leaves_the_model_alone_and_hardly_moves_its_answers(model) -> None:
    before = copy.deepcopy(model.state_dict())
    rigged = dm.attack("imprint", input_shape=(3, 16, 16)).tamper(model)
    batch = pictures(8, 8)
    with torch.no_grad():
        assert float((rigged(batch.inputs) - model(batch.inputs)).abs().max()) < 0.1
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_refusals(model, batch, classifier) -> None:
    with pytest.raises(dm.Refused, match="bears its layer"):
        dm.reconstruct(dm.observe(classifier, batch), "imprint")
    with pytest.raises(ValueError, match=r"attack\.bins: expected at least two"):
        dm.attack("imprint", bins=3).tamper(model)
    with pytest.raises(ValueError, match=r"attack\.functionals"):
        dm.attack("imprint", functionals=()).tamper(model)
    rigged = dm.attack("imprint", input_shape=(3, 16, 16)).tamper(model)
    with pytest.raises(ValueError, match="inserted for 768 inputs"):
        rigged(torch.zeros(1, 3, 8, 8))


def test_rounding_at_random_leaves_all_samples_that_bins_prove() -> None:
    """The contents' rank is the number of samples above what rounding may add, so that the bins of every sample are known."""
    torch.manual_seed(5)
    body = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 30), torch.nn.Tanh(), torch.nn.Linear(30, 100)).eval()
    batch = dm.Batch(torch.rand(6, 1, 8, 8), torch.arange(6))
    attack = dm.attack("imprint", input_shape=(1, 8, 8), bins=60)
    rounding = dm.defense("quantisation", bits=16, stochastic=True)
    found = dm.reconstruct(dm.observe(attack.tamper(body), batch, defenses=(rounding,)), attack)
    distance = torch.cdist(found.inputs.flatten(1), batch.inputs.flatten(1)) / batch.inputs.flatten(1).norm(dim=1)
    assert sorted(distance.argmin(1).tolist()) == [0, 1, 2, 3, 4, 5]
    assert float(distance.min(1).values.max()) < 2e-3


def test_a_model_that_passes_no_gradient_to_the_layer_gives_nothing() -> None:
    """A head of zeros: no bin is occupied."""
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(768, 20), torch.nn.ReLU(), torch.nn.Linear(20, 10))
    torch.nn.init.zeros_(model[-1].weight)
    found, _ = attacked(model, pictures(4, 1))
    assert len(found.inputs) == 0
    assert found.outcome == "singular"
