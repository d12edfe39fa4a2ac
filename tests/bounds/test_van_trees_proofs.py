"""Where van_trees is no theorem, though every layer looks smooth."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import dosimeter as dm
from dosimeter.bounds.van_trees import VanTrees
from dosimeter.client.training import FedAvg
from dosimeter.engines.bounds.gaussian_prior import fit_gaussian

SAMPLES = torch.randn(200, 4, generator=torch.Generator().manual_seed(5))


def _net(activation=None, gain=1.0, width=6):
    torch.manual_seed(1)
    first = nn.Linear(4, width)
    first.weight.data *= gain
    return nn.Sequential(first, activation or nn.Sigmoid(), nn.Linear(width, 2))


def _ceiling(model, size=1, bound=None, **options):
    inputs = SAMPLES.to(next(model.parameters()).dtype)
    batch, auxiliary = (dm.Batch(part, torch.zeros(len(part), dtype=torch.int64)) for part in (inputs[:size].clone(), inputs))
    (found,) = dm.ceilings(
        model, batch, defenses=(dm.defense("gaussian_noise", std=0.1),), auxiliary=auxiliary, bounds=bound or VanTrees(points=16), **options
    ).found
    return found


@pytest.mark.parametrize("gain", [1e3, 1e5, 1e8])
def test_units_as_steep_as_steps_take_the_proof_away(gain):
    """At 1e8 no draw of the prior meets a slope. The information found is zero, yet the update tells on which side the input lies."""
    found = _ceiling(_net(gain=gain))
    assert not found.proved
    assert any("more than its slopes explain" in sentence for sentence in found.assumptions)
    assert _ceiling(_net()).proved


def test_a_norm_over_two_numbers_is_nearly_their_sign():
    signs = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.LayerNorm(2, eps=1e-12), nn.Flatten(), nn.Linear(4, 2))
    assert not _ceiling(signs).proved


@pytest.mark.parametrize("seed", range(4))
def test_smooth_nets_stay_proved(seed):
    torch.manual_seed(seed)
    assert _ceiling(nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 3)), size=2).proved


def test_a_softplus_that_turns_linear_early_jumps():
    assert not _ceiling(_net(nn.Softplus(threshold=0.5))).proved
    assert _ceiling(_net(nn.Softplus())).proved


@pytest.mark.parametrize("training", [FedAvg(steps=2, mini_batch=1, shuffle=True), FedAvg(steps=2, autocast="bfloat16")])
def test_a_training_that_draws_or_rounds_proves_nothing(training):
    assert not _ceiling(_net(), size=2, training=training).proved
    assert _ceiling(_net(), size=2, training=FedAvg(steps=2, mini_batch=1)).proved


def test_half_precision_proves_nothing():
    assert not _ceiling(_net().bfloat16()).proved


def test_hooks_on_all_modules_and_replaced_methods_prove_nothing():
    handle = nn.modules.module.register_module_forward_hook(lambda module, inputs, outputs: None)
    try:
        assert not _ceiling(_net()).proved
    finally:
        handle.remove()
    layer = nn.Conv1d(1, 2, 3)
    model = nn.Sequential(nn.Unflatten(1, (1, 4)), layer, nn.Tanh(), nn.Flatten(), nn.Linear(4, 2))
    assert _ceiling(model).proved
    plain = layer._conv_forward
    vars(layer)["_conv_forward"] = lambda *arguments: plain(*arguments).sign() + 0 * plain(*arguments)
    assert not _ceiling(model).proved


def test_an_update_that_tells_nothing_has_no_influence_to_take_a_logarithm_of():
    """Samples less their own mean: a sample on its own is zero."""

    class Centred(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(4, 2)

        def forward(self, inputs):
            return self.head(inputs - inputs.mean(0, keepdim=True))

    assert float(_ceiling(Centred(), bound="inversion_influence").values[0]) == -math.inf


@pytest.mark.parametrize("gain", [1.0, 10.0, 30.0])
def test_the_best_guess_of_all_stays_below_a_proved_ceiling(gain):
    """The posterior mean, which has the least squared error of all guesses, from many draws of the prior weighed by their likelihood."""
    model, std, rng = _net(gain=gain).double(), 0.1, torch.Generator().manual_seed(7)
    parameters, target = {name: p.detach() for name, p in model.named_parameters()}, torch.zeros(1, dtype=torch.int64)

    def update(point):
        slopes = grad(lambda at: nn.functional.cross_entropy(functional_call(model, at, (point[None],)), target))(parameters)
        return torch.cat([slope.flatten() for slope in slopes.values()])

    prior = fit_gaussian(SAMPLES)
    truth, draws = prior.draw(100, rng), prior.draw(20_000, rng)
    seen, possible = vmap(update)(truth), vmap(update)(draws)
    seen = seen + std * torch.randn(seen.shape, generator=rng, dtype=torch.float64)
    guess = (-torch.cdist(seen, possible).square() / (2 * std**2)).softmax(1) @ draws
    squared = (guess - truth).square().sum(1)
    ceiling = _ceiling(model)
    assert ceiling.proved
    largest = float(squared.mean() + 3 * squared.std() / len(squared) ** 0.5)
    assert 10 * math.log10(4 / largest) <= float(ceiling.values[0])
