import copy

import pytest
import torch
from torch import nn

from dosimeter.client.observe import observe
from dosimeter.engines.identifiability import identifiability
from dosimeter.network.head import find_head, locate_head
from dosimeter.network.model_state import copy_of
from dosimeter.network.probing import input_of
from dosimeter.runs.server import recover_features, recover_labels
from dosimeter.surfaces.scoring import score
from dosimeter.types import Batch, Refused


def test_finds_the_last_layer_and_its_gradients(classifier, batch):
    head = find_head(observe(classifier, batch))
    assert (head.name, head.classes, head.features, head.non_negative) == ("5", 10, 12, True)
    features = input_of(classifier, "5", batch.inputs)
    error = (torch.softmax(head.logits(features), 1) - nn.functional.one_hot(batch.targets, 10)) / len(batch.inputs)
    torch.testing.assert_close(head.weight_gradient, error.T @ features)
    torch.testing.assert_close(head.bias_gradient, error.sum(0))


def test_a_head_named_first_is_still_found():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.classify = nn.Linear(6, 3, bias=False)
            self.body = nn.Linear(4, 6)

        def forward(self, x):
            return self.classify(torch.tanh(self.body(x)))

    head = find_head(observe(Odd(), Batch(torch.rand(2, 4), torch.tensor([0, 2]))))
    assert (head.name, head.bias, head.bias_gradient, head.non_negative) == ("classify", None, None, False)


def test_a_log_softmax_behind_the_head_does_no_harm():
    model = nn.Sequential(nn.Linear(4, 5), nn.LogSoftmax(1))
    assert locate_head(model, (4,)) == ("0", False)
    with pytest.raises(Refused, match="something follows it"):
        locate_head(model, (4,), allow_shift=False)


def test_withheld_gradients_are_none(classifier, batch):
    exposure = observe(classifier, batch)
    del exposure.update["5.weight"]
    assert find_head(exposure).weight_gradient is None


def test_modes_and_buffers_survive(normed_classifier, batch):
    model = normed_classifier.train()
    running = model[1].running_mean.clone()
    locate_head(model, (1, 8, 8))
    input_of(model, "4", batch.inputs)
    assert model.training
    assert model[1].training
    assert torch.equal(running, model[1].running_mean)


class Capped(nn.Module):
    """Logits bent towards ±c."""

    def __init__(self, cap: float) -> None:
        super().__init__()
        self.linear, self.cap = nn.Linear(64, 3), cap

    def forward(self, x):
        return self.cap * torch.tanh(self.linear(x.flatten(1)) / self.cap)


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        (Capped(8.0), "something follows it"),
        (Capped(50.0), "something follows it"),
        (nn.Sequential(nn.Conv2d(1, 3, 8), nn.Flatten()), "has no linear layer"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Softmax(1)), "something follows it"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU()), "something follows it"),
    ],
)
def test_refusals(model, sentence):
    with pytest.raises(Refused, match=sentence):
        locate_head(model, (1, 8, 8))


def test_a_proof_is_shared_with_copies_and_dropped_when_the_model_changes():
    model = nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4))
    passes = []
    model[0].register_forward_hook(lambda *_: passes.append(1))
    assert locate_head(model, (6,)) == ("2", True)
    once = len(passes)
    twin = copy_of(model)
    assert twin is not model
    assert locate_head(twin, (6,)) == locate_head(model, (6,)) == ("2", True)
    assert len(passes) == once
    twin[1] = nn.Tanh()
    assert locate_head(twin, (6,)) == ("2", False)
    assert locate_head(model, (6,)) == ("2", True)
    with torch.no_grad():
        model[2].weight.mul_(2)
    told = len(passes)
    locate_head(model, (6,))
    assert len(passes) == told + once


class _Tied(nn.Module):
    def __init__(self, head_first: bool) -> None:
        super().__init__()
        names = ("head", "encoder") if head_first else ("encoder", "head")
        for name in names:
            setattr(self, name, nn.Linear(12, 12))
        self.encoder.weight = self.head.weight

    def forward(self, inputs):
        return self.head(torch.relu(self.encoder(inputs)))


@pytest.mark.parametrize("head_first", [False, True])
def test_a_head_that_shares_its_weight_is_refused(head_first):
    exposure = observe(_Tied(head_first).eval(), Batch(torch.rand(3, 12), torch.tensor([1, 4, 8])))
    with pytest.raises(Refused, match="shares its weight with another"):
        recover_labels(exposure, "ilrg")


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = nn.Linear(12, 10), nn.Linear(10, 10)

    def forward(self, inputs):
        hidden = torch.relu(self.encoder(inputs))
        return self.head(torch.relu(nn.functional.linear(hidden, self.head.weight)))


def test_a_head_whose_weight_is_used_twice_is_refused():
    exposure = observe(_Twice().eval(), Batch(torch.rand(3, 12), torch.tensor([1, 4, 8])))
    assert not find_head(exposure).alone
    with pytest.raises(Refused, match="shares its weight with another"):
        recover_labels(exposure, "ilrg")


@pytest.mark.parametrize("training", [False, True])
def test_features_are_non_negative_in_the_mode_of_the_client(training):
    model = nn.Sequential(nn.Linear(12, 10), nn.ReLU(), nn.BatchNorm1d(10), nn.Linear(10, 4)).train(training)
    for _ in range(2):  # the second time from what is known
        assert find_head(observe(model, Batch(torch.rand(5, 12), torch.arange(5) % 4))).non_negative is (not training)
        assert all(module.training is training for module in model.modules())
    after_relu = nn.Sequential(nn.Linear(12, 10), nn.BatchNorm1d(10), nn.ReLU(), nn.Linear(10, 4)).train(training)
    assert find_head(observe(after_relu, Batch(torch.rand(5, 12), torch.arange(5) % 4))).non_negative


class Autocast(nn.Module):
    """Single-precision weights, bfloat16 arithmetic."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 24)
        self.classify = nn.Linear(24, 10)

    def forward(self, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return self.classify(self.body(x).relu()).float()


def test_a_head_under_autocast_is_found_with_the_precision_that_it_computes_in():
    torch.manual_seed(0)
    exposure = observe(Autocast().eval(), Batch(torch.rand(1, 16), torch.tensor([6])))
    head = find_head(exposure)
    assert (head.name, head.non_negative, head.alone) == ("classify", True, True)
    assert head.precision == torch.finfo(torch.bfloat16).eps
    for method in ("soft_scalar", "ilrg"):
        assert recover_labels(exposure, method).labels.tolist() == [6]
    assert not recover_labels(exposure, "soft_scalar").certified


class Switched(nn.Module):
    """One of two activations, by a setting that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(16, 12)
        self.classify = nn.Linear(12, 8, bias=False)
        self.kind = "relu"
        self.settings = {"scale": 1.0}

    def forward(self, x):
        features = self.body(x).relu() if self.kind == "relu" else self.body(x).tanh()
        return self.classify(features) * self.settings["scale"]


def test_a_setting_that_is_changed_is_proved_anew():
    torch.manual_seed(1)
    model = Switched().eval()
    assert locate_head(model, (16,)) == ("classify", True)
    model.kind = "tanh"
    assert locate_head(model, (16,)) == ("classify", False)
    model.settings["scale"] = 2.0
    with pytest.raises(Refused, match="something follows it"):
        locate_head(model, (16,))
    model.settings["scale"] = 1.0
    assert locate_head(model, (16,)) == ("classify", False)
    model.classify.register_forward_hook(lambda module, received, logits: 3 * logits)
    with pytest.raises(Refused, match="something follows it"):
        locate_head(model, (16,))


def test_what_is_proved_in_one_mode_is_kept_through_the_other(monkeypatch):
    model = Switched().eval()
    locate_head(model, (16,))
    locate_head(model.train(), (16,))
    monkeypatch.setattr("dosimeter.network.head._prove", None)
    assert locate_head(model.eval(), (16,)) == ("classify", True)


class SavedModule(nn.Module):
    """What PEFT puts in place of a module of `modules_to_save`: the frozen original, and a copy that is trained and used."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.original_module = original.requires_grad_(False)

    @property
    def weight(self):
        return self.modules_to_save["default"].weight

    @property
    def bias(self):
        return self.modules_to_save["default"].bias

    def forward(self, inputs):
        return self.modules_to_save["default"](inputs)


def test_a_head_that_peft_saves_is_not_withheld(classifier, batch):
    plain = observe(classifier, batch)
    wrapped = copy.deepcopy(classifier)
    wrapped[5] = SavedModule(wrapped[5])
    exposure = observe(wrapped, batch)
    head = find_head(exposure)
    assert (head.name, head.alone) == ("5", True)
    assert torch.equal(head.weight_gradient, plain.update["5.weight"])
    assert torch.equal(head.bias_gradient, plain.update["5.bias"])
    for method in ("ilrg", "subspace"):
        assert torch.equal(recover_labels(exposure, method).counts, recover_labels(plain, method).counts)
    assert identifiability(exposure).separable == identifiability(plain).separable


class LastToken(nn.Module):
    """A classifier of texts as Transformers makes it of a decoder: logits at every position, of which the last is returned."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.score = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Linear(16, 10, bias=False)

    def forward(self, input_ids, attention_mask):
        logits = self.score(torch.tanh(self.body(self.embed(input_ids))).cumsum(1))
        return logits[torch.arange(len(logits)), attention_mask.sum(1) - 1]


def test_a_head_at_every_position_of_which_one_is_returned():
    ids, mask = torch.randint(50, (3, 6), generator=torch.Generator().manual_seed(1)), torch.ones(3, 6, dtype=torch.int64)
    mask[1, 4:] = 0
    batch = Batch({"input_ids": ids, "attention_mask": mask}, torch.tensor([3, 1, 4]))
    exposure = observe(LastToken().eval(), batch)
    assert recover_labels(exposure, "subspace").labels.tolist() == [1, 3, 4]
    found = recover_features(exposure, "subspace")
    assert bool(found.certified.all())
    scores = score(found, batch, exposure=exposure)
    assert scores.details["false_certificates"] == 0
    assert float(scores["feature_error"].max()) < 1e-4


@pytest.mark.parametrize(("layer", "name"), [(nn.Sigmoid(), "sigmoid"), (nn.Softmax(1), "softmax"), (nn.Tanh(), "tanh")])
def test_what_follows_the_head_is_part_of_a_loss_of_the_clients_own(layer, name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 5), layer).eval()
    batch = Batch(torch.rand(2, 1, 4, 4), torch.rand(2, 5))
    exposure = observe(model, batch, loss=lambda outputs, targets: (outputs - targets).abs().mean())
    head = find_head(exposure, closings=True)
    assert (head.name, head.closing, head.alone) == ("3", name, True)
    for other, closings in ((exposure, False), (observe(model, Batch(batch.inputs, torch.tensor([1, 2]))), True)):
        with pytest.raises(Refused, match="something follows it"):
            find_head(other, closings=closings)
