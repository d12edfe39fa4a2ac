"""A sample's own gradient: it is what the client's training gives, and mixtures have another."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.recursion.own_gradients import OwnGradients

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
    assert own.explain(response, gradient[rows])
    assert not own.explain(response, gradient[rows] * 1.001)
    assert not own.explain(own.respond(one.inputs[0].flatten() * 0.99, rows), gradient[rows])
    torch.testing.assert_close(own._along_biases(one.inputs[0].flatten(), own._errors(response.logits)[one.targets[0]]), gradient)


def test_the_slopes_are_the_derivatives_of_the_logits() -> None:
    """Reference: PyTorch's own Jacobian."""
    one, model = batch(1), network()
    own = OwnGradients(dm.observe(model, one), ["1.bias"])
    expected = torch.func.jacrev(lambda bias: torch.func.functional_call(model, {"1.bias": bias}, (one.inputs,))[0])(model[1].bias)
    response = own.respond(one.inputs[0].flatten(), torch.arange(30))
    torch.testing.assert_close(response.slopes, expected.detach().double())


@pytest.mark.parametrize("classes", [2, 5])
def test_a_mean_of_two_samples_of_one_label_is_not_explained(classes) -> None:
    """Its weight is nearly twice the weight that the model gives it. Two copies would have exactly twice the weight."""
    two = dm.Batch(batch(2).inputs, torch.tensor([1, 1]))
    exposure = dm.observe(network(classes), two)
    own, gradient = OwnGradients(exposure, ["1.bias"]), exposure.update["1.bias"].double()
    row = int(gradient.abs().argmax())
    mixture = (exposure.update["1.weight"][row] / exposure.update["1.bias"][row]).double()
    response = own.respond(mixture, torch.tensor([row]))
    assert not own.explain(response, gradient[row : row + 1])
    assert own.explain_twice(response, gradient[row : row + 1]) is None


def test_two_copies_are_explained_under_the_same_label_or_two() -> None:
    for labels in ([1, 1], [1, 3]):
        copies = dm.Batch(batch(1).inputs.repeat(2, 1, 1, 1), torch.tensor(labels))
        exposure = dm.observe(network(), copies)
        own, gradient, rows = OwnGradients(exposure, ["1.bias"]), exposure.update["1.bias"].double(), torch.tensor([0, 3, 7, 11])
        added = own.explain_twice(own.respond(copies.inputs[0].flatten(), rows), gradient[rows])
        assert added is not None
        torch.testing.assert_close(added, gradient, rtol=1e-4, atol=1e-8)


def test_soft_labels_are_tried_where_they_are_known() -> None:
    soft = torch.tensor([[0.1, 0.6, 0.3, 0.0]])
    one = dm.Batch(batch(1).inputs, soft)
    exposure = dm.observe(network(), one)
    gradient, rows = exposure.update["1.bias"].double(), torch.tensor([0, 3, 7])
    for known, expected in ((None, False), (soft, True)):
        own = OwnGradients(exposure, ["1.bias"], known)
        assert own.explain(own.respond(one.inputs[0].flatten(), rows), gradient[rows]) is expected


@pytest.mark.parametrize(("classes", "independent"), [(2, 1), (3, 2), (5, 4)])
def test_rows_are_as_independent_as_the_classes_allow(classes, independent) -> None:
    model, inputs = network(classes), batch(1).inputs[0].flatten()
    with torch.no_grad():
        model[-1].weight.mul_(5)  # predictions that vary with the input
    own = OwnGradients(dm.observe(model, batch(3, classes)), ["1.bias"])
    firing = (model[1](inputs[None]) > 0)[0].nonzero().flatten()[:6]
    assert own.count_independent(own.respond(inputs, firing)) == independent


def test_a_model_that_predicts_the_same_for_all_inputs_has_no_independent_rows() -> None:
    model = network(5)
    with torch.no_grad():
        model[-1].weight.mul_(1e-3)
    own = OwnGradients(dm.observe(model, batch(3, 5)), ["1.bias"])
    assert own.count_independent(own.respond(batch(1).inputs[0].flatten(), torch.arange(6))) == 0


def test_nothing_is_computed_where_samples_mix() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    assert not OwnGradients(dm.observe(model.train(), batch(2, 3)), ["1.bias"]).is_possible()
    assert OwnGradients(dm.observe(model.eval(), batch(2, 3)), ["1.bias"]).is_possible()


def test_without_a_known_share_nothing_is_explained() -> None:
    one = batch(1)
    exposure = dm.observe(network(), one, declare_batch_size=False)
    own, rows = OwnGradients(exposure, ["1.bias"]), torch.tensor([0, 3])
    response = own.respond(one.inputs[0].flatten(), rows)
    assert not own.explain(response, exposure.update["1.bias"].double()[rows])
    assert own.explain_twice(response, exposure.update["1.bias"].double()[rows]) is None
