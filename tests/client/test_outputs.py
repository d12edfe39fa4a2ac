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


class TwoHeads(nn.Module):
    def __init__(self, wrap):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.classes, self.box = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU()), nn.Linear(32, 10), nn.Linear(32, 4)
        self.wrap = wrap

    def forward(self, images):
        features = self.body(images)
        return self.wrap(self.classes(features), self.box(features))


def loss_of_both(classes, box, targets):
    return nn.functional.cross_entropy(classes, targets[:, 0].long().clamp(0, 9)) + nn.functional.smooth_l1_loss(box, targets[:, 1:])


BOTH = {
    "tuple": (lambda c, b: (c, b), lambda o, t: loss_of_both(*o, t)),
    "list": (lambda c, b: [c, b], lambda o, t: loss_of_both(o[0], o[1], t)),
    "mapping": (lambda c, b: {"classes": c, "box": b}, lambda o, t: loss_of_both(o["classes"], o["box"], t)),
    "nested": (lambda c, b: {"heads": [c, b], "none": None}, lambda o, t: loss_of_both(*o["heads"], t)),
}


@pytest.mark.parametrize("case", BOTH)
def test_a_loss_of_the_clients_own_takes_all_that_the_model_returns(case):
    wrap, loss = BOTH[case]
    model = TwoHeads(wrap).eval()
    targets = torch.cat([LABELS[:, None].float(), numbers(4, 4)], 1)
    batch = dm.Batch(pictures(), targets)
    exposure = dm.observe(model, batch, loss=loss)
    wanted = torch.autograd.grad(loss(model(pictures()), targets), list(model.parameters()))
    assert all(torch.equal(exposure.update[name], one) for (name, _), one in zip(model.named_parameters(), wanted))
    found = dm.reconstruct(exposure, "inverting_gradients", labels=targets, steps=2)
    assert found.outcome is dm.Outcome.COMPLETED, found.message
    report = dm.audit(model, batch, loss=loss, labels=[], targets=[], features=[], maps=[], attacks=[dm.attack("dlg", steps=2)])
    assert [record.outcome for record in report.records if record.surface == "inputs"] == ["completed"]


def test_the_tensor_for_a_loss_of_pytorch_is_named_or_alone():
    images, labels = pictures(), LABELS
    named = dm.observe(TwoHeads(lambda c, b: {"box": b, "out": c}).eval(), dm.Batch(images, labels))
    assert named.public.classes == 10
    first = dm.observe(TwoHeads(lambda c, b: [c, b]).eval(), dm.Batch(images, labels))
    assert first.public.classes == 10
    with pytest.raises(ValueError, match=r"model: expected one tensor of outputs .* got box, classes; call one of them logits"):
        dm.observe(TwoHeads(lambda c, b: {"box": b, "classes": c}).eval(), dm.Batch(images, labels))


def test_a_loss_that_fails_or_gives_no_number_is_a_sentence():
    def by_name(outputs, targets):
        return outputs["classes"].sum()

    with pytest.raises(ValueError, match=r"loss: .*by_name fails on outputs \(4, 10\) and targets \(4,\)"):
        dm.observe(dense(10), dm.Batch(pictures(), LABELS), loss=by_name)
    with pytest.raises(ValueError, match=r"expected one number for the batch, got a tensor of shape \(4,\)"):
        dm.observe(dense(10), dm.Batch(pictures(), LABELS), loss=nn.CrossEntropyLoss(reduction="none"))
    exposure = dm.observe(dense(10), dm.Batch(pictures(), LABELS), loss=lambda z, t: nn.functional.nll_loss(z.log_softmax(1), t))
    with pytest.raises(dm.Refused, match="takes no targets that an attack makes up"):
        dm.reconstruct(exposure, "dlg", steps=2)


class Steps(nn.Module):
    """A class at each step of a series of numbers: outputs (B, T, C)."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.recurrent, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 5)

    def forward(self, series):
        return self.head(self.recurrent(series)[0])


def test_a_class_at_each_step_of_a_series_is_audited():
    model, series = Steps().eval(), numbers(2, 6, 4)
    batch = dm.Batch(series, torch.randint(5, (2, 6), generator=torch.Generator().manual_seed(3)))
    exposure = dm.observe(model, batch, loss=nn.CrossEntropyLoss())
    assert exposure.public.classes == 5
    report = dm.audit(model, batch, loss=nn.CrossEntropyLoss(), labels=["subspace"], maps=[], attacks=[dm.attack("dlg", steps=2)])
    assert {record.surface: record.outcome for record in report.records if record.method in ("subspace", "dlg")} == {
        "labels": "not attempted",
        "inputs": "completed",
    }
