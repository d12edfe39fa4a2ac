"""A sample's own gradient: it is what the client's training gives, and mixtures have another."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.recursion.own_gradients import LIKELY, OwnGradients

LOSSES = ["cross_entropy", "focal", "binary_cross_entropy"]


def network(classes: int = 4, activation: nn.Module | None = None) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 30), activation or nn.ReLU(), nn.Linear(30, 12), nn.Tanh(), nn.Linear(12, classes))


def batch(count: int, classes: int = 4, seed: int = 1) -> dm.Batch:
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(count, 1, 4, 4, generator=rng), torch.randint(classes, (count,), generator=rng))


@pytest.mark.parametrize("loss", LOSSES)
def test_the_gradient_of_a_batch_of_one_is_its_own(loss) -> None:
    one = batch(1)
    exposure = dm.observe(network(), one, loss=loss)
    own, gradient, rows = OwnGradients(exposure, ["1.bias"]), exposure.update["1.bias"].double(), torch.tensor([0, 3, 7, 11])
    response = own.respond(one.inputs[0].flatten(), rows)
    assert own.compare(response, gradient[rows]).explains(1.0)
    assert not own.compare(response, gradient[rows] * 1.001).explains(1.0)
    assert not own.compare(own.respond(one.inputs[0].flatten() * 0.99, rows), gradient[rows]).explains(1.0)


def test_the_slopes_are_the_derivatives_of_the_logits() -> None:
    """Reference: PyTorch's own Jacobian."""
    one, model = batch(1), network()
    own = OwnGradients(dm.observe(model, one), ["1.bias"])
    expected = torch.func.jacrev(lambda bias: torch.func.functional_call(model, {"1.bias": bias}, (one.inputs,))[0])(model[1].bias)
    response = own.respond(one.inputs[0].flatten(), torch.arange(30))
    torch.testing.assert_close(response.slopes, expected.detach().double())


@pytest.mark.parametrize("classes", [2, 5])
def test_a_mean_of_two_samples_of_one_label_is_not_explained(classes) -> None:
    """Its weight is nearly twice the weight that the model gives it."""
    two = dm.Batch(batch(2).inputs, torch.tensor([1, 1]))
    exposure = dm.observe(network(classes), two)
    own, gradient = OwnGradients(exposure, ["1.bias"]), exposure.update["1.bias"].double()
    row = int(gradient.abs().argmax())
    mixture = (exposure.update["1.weight"][row] / exposure.update["1.bias"][row]).double()
    response = own.respond(mixture, torch.tensor([row]))
    assert not own.compare(response, gradient[row : row + 1]).explains(0.5)


def test_no_gradient_tells_two_alike_samples_from_two_copies_of_their_mean() -> None:
    """Why two copies are not claimed: within a linear region the gradients differ by the square of what tells the samples apart."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, 30), nn.LeakyReLU(0.1), nn.Linear(30, 2))
    with torch.no_grad():
        model[1].bias.copy_(torch.where(torch.arange(30) % 2 == 0, 20.0, -20.0))  # one linear region holds all inputs
        model[3].weight.mul_(0.02)
        model[3].bias.copy_(-model[3](model[2](model[1](torch.full((1, 16), 0.5))))[0])
    alike = dm.Batch(batch(2).inputs, torch.tensor([1, 1]))
    update = dm.observe(model, alike).update
    mean = (update["1.weight"].double().sum(0) / update["1.bias"].double().sum()).reshape(1, 1, 4, 4).float()
    copies = dm.observe(model, dm.Batch(mean.repeat(2, 1, 1, 1), alike.targets)).update
    assert float((mean - alike.inputs).flatten(1).norm(dim=1).min() / mean.norm()) > 0.2
    for name, gradient in update.items():
        torch.testing.assert_close(copies[name], gradient, rtol=1e-4, atol=1e-6 * float(gradient.abs().max()))
    for exposure in (dm.observe(model, alike), dm.observe(model, dm.Batch(mean.repeat(2, 1, 1, 1), alike.targets))):
        assert len(dm.reconstruct(exposure, "linear_recursion").inputs) == 0


def test_a_constant_prediction_that_is_no_mean_of_labels_still_proves_a_sample() -> None:
    model = network(2)
    with torch.no_grad():
        model[-1].weight.mul_(1e-5)
        model[-1].bias.copy_(torch.tensor([0.3, 0.0]))
    one = batch(3, 2)
    exposure = dm.observe(model, one)
    own = OwnGradients(exposure, ["1.bias"])
    alone = ((model[1](one.inputs.flatten(1)) > 0).sum(0) == 1).nonzero().flatten()[:1]
    mixture = (exposure.update["1.weight"][alone[0]] / exposure.update["1.bias"][alone[0]]).double()
    assert own.compare(own.respond(mixture, alone), exposure.update["1.bias"].double()[alone]).explains(1 / 3)


def test_soft_labels_are_tried_where_they_are_known() -> None:
    soft = torch.tensor([[0.1, 0.6, 0.3, 0.0]])
    one = dm.Batch(batch(1).inputs, soft)
    exposure = dm.observe(network(), one)
    gradient, rows = exposure.update["1.bias"].double(), torch.tensor([0, 3, 7])
    for known, expected in ((None, False), (soft, True)):
        own = OwnGradients(exposure, ["1.bias"], known)
        assert own.compare(own.respond(one.inputs[0].flatten(), rows), gradient[rows]).explains(1.0) is expected


@pytest.mark.parametrize("classes", [2, 3, 5, 10])
def test_the_luck_of_rows_falls_with_the_directions_that_classes_span(classes) -> None:
    """Two classes have one direction: all rows then show the same mixture. Each further direction is one more coincidence."""
    model, inputs = network(classes), batch(1).inputs[0].flatten()
    with torch.no_grad():
        model[-1].weight.mul_(5)  # predictions that vary with the input
    own = OwnGradients(dm.observe(model, batch(3, classes)), ["1.bias"])
    firing = (model[1](inputs[None]) > 0)[0].nonzero().flatten()[:6]
    response = own.respond(inputs, firing)
    luck = own.luck_of_agreement(response, 3e-6)
    assert (luck == 1) if classes == 2 else luck < 0.1
    assert (luck <= LIKELY) == (classes >= 5)
    assert own.luck_of_agreement(response, 3e-4) >= luck


def test_rows_of_a_model_that_predicts_the_same_for_all_inputs_prove_nothing() -> None:
    model = network(5)
    with torch.no_grad():
        model[-1].weight.mul_(1e-4)
    own = OwnGradients(dm.observe(model, batch(3, 5)), ["1.bias"])
    assert own.luck_of_agreement(own.respond(batch(1).inputs[0].flatten(), torch.arange(6)), 3e-6) > LIKELY


def test_nothing_is_computed_where_samples_mix() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    assert not OwnGradients(dm.observe(model.train(), batch(2, 3)), ["1.bias"]).is_possible()
    assert OwnGradients(dm.observe(model.eval(), batch(2, 3)), ["1.bias"]).is_possible()


@pytest.mark.parametrize("factor", [1.0, 0.25, 0.037])
def test_the_shares_of_a_scaled_gradient_hold_the_factor(factor) -> None:
    """Reference: the factor that was multiplied, under one of the labels."""
    one = batch(1)
    exposure = dm.observe(network(), one)
    own, rows = OwnGradients(exposure, ["1.bias"]), torch.tensor([0, 3, 7, 11])
    shares = own.compare(own.respond(one.inputs[0].flatten(), rows), factor * exposure.update["1.bias"].double()[rows]).shares()
    assert any(abs(share.value / factor - 1) <= share.spread for share in shares)


def test_noise_widens_what_is_explained_until_chance_could_explain_as_much() -> None:
    one = batch(1)
    exposure = dm.observe(network(), one)
    own, rows = OwnGradients(exposure, ["1.bias"]), torch.arange(30)
    gradient = exposure.update["1.bias"].double()
    rows = rows[gradient.abs() > 0]
    gradient = gradient[rows]
    response = own.respond(one.inputs[0].flatten(), rows)
    size = float(gradient.norm())
    noise = 1e-4 * size / len(rows) ** 0.5 * torch.randn(len(rows), generator=torch.Generator().manual_seed(0)).double()
    assert not own.compare(response, gradient + noise).explains(1.0)
    assert own.compare(response, gradient + noise, noise=1e-4 * size / len(rows) ** 0.5).explains(1.0)
    assert not own.compare(response, gradient, noise=0.5 * size).explains(1.0)  # anything would fit
