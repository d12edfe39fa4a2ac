"""What a model may give back and what a client may train it towards: one number, grids, tuples, fields, and every loss of PyTorch."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import dosimeter as dm

LABELS = torch.tensor([1, 2, 3, 0])


def pictures(count=4):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


def dense(outputs, *rest):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, outputs), *rest)


def grid():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1))


def numbers(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


def places():
    return torch.randint(5, (4, 8, 8), generator=torch.Generator().manual_seed(3))


IGNORED = torch.tensor([1, 2, -100, 0])
CASES = {
    "squared error": (dense(3), numbers(4, 3), nn.MSELoss()),
    "one number": (dense(1, nn.Flatten(0)), numbers(4), nn.MSELoss()),
    "one logit": (dense(1, nn.Flatten(0)), torch.tensor([0.0, 1.0, 1.0, 0.0]), nn.BCEWithLogitsLoss()),
    "positive weights": (dense(3), numbers(4, 3).round().clamp(0, 1), nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 4.0))),
    "class weights": (dense(10), LABELS, nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0))),
    "ignored": (dense(10), IGNORED, nn.CrossEntropyLoss()),
    "smoothing": (dense(10), LABELS, nn.CrossEntropyLoss(label_smoothing=0.1)),
    "sum": (dense(10), LABELS, nn.CrossEntropyLoss(reduction="sum")),
    "log-probabilities": (dense(10, nn.LogSoftmax(1)), LABELS, nn.NLLLoss()),
    "absolute error": (dense(3), numbers(4, 3), nn.L1Loss()),
    "grid": (grid(), places(), nn.CrossEntropyLoss()),
    "grid of labels": (grid(), numbers(4, 5, 8, 8).round().clamp(0, 1), nn.BCEWithLogitsLoss()),
    "grid of numbers": (grid(), numbers(4, 5, 8, 8), nn.MSELoss()),
}


@pytest.mark.parametrize("case", CASES)
def test_the_update_is_pytorchs_gradient_and_an_attack_replays_it(case):
    model, targets, loss = CASES[case]
    exposure = dm.observe(model, dm.Batch(pictures(), targets), loss=loss)
    wanted = torch.autograd.grad(loss(model(pictures()), targets), list(model.parameters()))
    for name, gradient in zip(dict(model.named_parameters()), wanted):
        assert torch.allclose(exposure.update[name], gradient, rtol=1e-4, atol=1e-6), name
    found = dm.reconstruct(exposure, "dlg", labels=None, steps=2)
    assert found.outcome is dm.Outcome.COMPLETED, found.message
    assert found.labels.shape[1:] == model(pictures()).shape[1:]
    known = dm.reconstruct(exposure, "inverting_gradients", labels=targets, steps=2) if case != "ignored" else found
    assert known.outcome is dm.Outcome.COMPLETED, known.message


def test_a_guess_at_the_truth_has_no_distance():
    """The attacks replay the client's own loss: at the private batch nothing is left to match."""
    for case in ("one number", "class weights", "grid", "grid of numbers"):
        model, targets, loss = CASES[case]
        batch = dm.Batch(pictures(), targets)
        exposure = dm.observe(model, batch, loss=loss)
        attack = dm.attack("inverting_gradients", steps=1, total_variation=0.0)
        found = dm.reconstruct(exposure, attack, labels=targets)
        assert attack.objective(exposure, found, batch.inputs, targets) < 1e-6 < found.objective, case


def test_log_probabilities_are_logits_of_their_own():
    assert dm.observe(CASES["log-probabilities"][0], dm.Batch(pictures(), LABELS), loss=nn.NLLLoss()).public.loss == dm.CrossEntropy()
    other = dm.observe(dense(10), dm.Batch(pictures(), LABELS), loss=nn.NLLLoss())
    assert other.public.loss.name == "own loss"


@pytest.mark.parametrize(
    "give", [lambda out: (out, out.sum()), lambda out: {"out": out, "aux": out}, lambda out: SimpleNamespace(logits=out)]
)
def test_the_outputs_are_found_in_what_a_model_returns(give):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = dense(10)

        def forward(self, inputs):
            return give(self.inner(inputs))

    exposure = dm.observe(Wrapped(), dm.Batch(pictures(), LABELS))
    assert dm.recover_labels(exposure, "subspace").certified


def test_default_losses_follow_the_outputs():
    assert dm.observe(grid(), dm.Batch(pictures(), places())).public.kind == "grids"
    assert dm.observe(dense(3), dm.Batch(pictures(), numbers(4, 3)), loss="squared_error").public.kind == "regressions"


class Ends(nn.Module):
    """A dense net whose logits are changed at the end."""

    def __init__(self, change):
        super().__init__()
        self.net, self.change = dense(3), change

    def forward(self, inputs):
        return self.change(self.net(inputs))


@pytest.mark.parametrize(
    ("model", "targets", "loss", "message"),
    [
        (dense(1), numbers(4), nn.MSELoss(), r"batch.targets: expected \(B, 1\), one number for each output"),
        (dense(3), torch.ones(4, 3, dtype=torch.int64), nn.MSELoss(), "batch.targets: expected finite floating-point numbers"),
        (grid(), torch.zeros(4, 5, 5, dtype=torch.int64), None, r"batch.targets: expected \(B, 8, 8\) class ids"),
        (grid(), torch.full((4, 8, 8), 5), None, "batch.targets: expected class ids in 0..4, or -100"),
        (dense(1), torch.zeros(4, dtype=torch.int64), None, "cross_entropy over one logit has the gradient zero"),
        (nn.Sequential(dense(3), nn.Flatten(0)), LABELS, None, "model: expected one tensor of outputs for each sample"),
        (Ends(lambda logits: logits.to_sparse()), LABELS, None, "got a sparse tensor"),
        (Ends(lambda logits: torch.nested.nested_tensor(list(logits))), LABELS, None, "got a nested tensor"),
        (Ends(lambda logits: logits.to("meta")), LABELS, None, "its outputs are on the device meta, and its inputs on cpu"),
    ],
)
def test_what_does_not_fit_gets_one_sentence(model, targets, loss, message):
    with pytest.raises(ValueError, match=message):
        dm.observe(model, dm.Batch(pictures(), targets), loss=loss)


def test_the_methods_of_one_output_refuse_grids():
    exposure = dm.observe(grid(), dm.Batch(pictures(), places()))
    with pytest.raises(dm.Refused, match="this model has one at each place of a grid"):
        dm.recover_labels(exposure, "subspace")
    with pytest.raises(ValueError, match=r"labels: expected targets of shape \(B, 8, 8\)"):
        dm.reconstruct(exposure, "inverting_gradients", labels=torch.zeros(4, 3), steps=1)
