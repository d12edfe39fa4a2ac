"""Texts as a client trains on them: token ids, dictionaries of a tokenizer, outputs at each position, and losses of the caller's own."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import dosimeter as dm
from dosimeter.client.losses import OwnLoss, loss_of
from dosimeter.models.transformer import Transformer


def model_of(kind="gpt2", **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Transformer(kind, vocabulary=60, width=16, layers=1, heads=2, positions=8, **options).eval()


def texts(seed=0, batch=3):
    return torch.randint(60, (batch, 6), generator=torch.Generator().manual_seed(seed))


def gradient_of(model, value):
    model.zero_grad()
    value.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


def assert_same(update, wanted):
    for name, gradient in wanted.items():
        assert torch.allclose(update[name], gradient, rtol=1e-4, atol=1e-7), name


def test_next_tokens_and_masked_tokens_train_as_pytorch_does():
    model, ids = model_of(), texts()
    targets = ids.roll(-1, 1)
    targets[:, -1] = -100
    wanted = gradient_of(model, cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-100))
    for loss in (None, "cross_entropy", nn.CrossEntropyLoss(), dm.TokenCrossEntropy()):
        exposure = dm.observe(model, dm.Batch(ids, targets), loss=loss)
        assert exposure.public.loss == dm.TokenCrossEntropy()
        assert_same(exposure.update, wanted)
    shifted = dm.observe(model, dm.Batch(ids, ids), loss=dm.TokenCrossEntropy(shift=True))
    assert_same(shifted.update, wanted)


def test_the_gradient_at_the_logits_is_autograds():
    logits, targets = torch.randn(2, 5, 7, dtype=torch.float64, requires_grad=True), torch.randint(7, (2, 5))
    targets[0, 2] = -100
    for loss in (dm.TokenCrossEntropy(), dm.TokenCrossEntropy(shift=True)):
        (wanted,) = torch.autograd.grad(loss.per_sample(logits, targets).sum(), logits)
        assert torch.allclose(loss.logit_gradient(logits, targets), wanted)


def test_dictionaries_reach_the_model_by_name():
    model, ids = model_of("bert", classes=4), texts()
    mask = torch.ones_like(ids)
    mask[1, 4:] = 0
    labels = torch.tensor([0, 1, 3])
    exposure = dm.observe(model, dm.Batch({"input_ids": ids, "attention_mask": mask}, labels))
    assert_same(exposure.update, gradient_of(model, cross_entropy(model(ids, mask), labels)))
    assert exposure.public.kind == "texts"
    assert exposure.public.blank.tensors["input_ids"].tolist() == [[0] * 6]
    assert sorted(dm.recover_labels(exposure, "subspace").labels.tolist()) == [0, 1, 3]


def test_the_exposure_holds_nothing_of_the_texts():
    model, batch = model_of(classes=2), dm.Batch({"input_ids": texts()}, torch.tensor([0, 1, 0]))
    exposure = dm.observe(model, batch)
    before = dm.recover_tokens(exposure)
    batch.inputs.tensors["input_ids"].zero_()
    assert dm.recover_tokens(exposure) == before


def test_logits_are_found_in_what_transformers_return():
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = model_of()

        def forward(self, input_ids):
            return {"loss": None, "logits": self.inner(input_ids)}

    exposure = dm.observe(Wrapped(), dm.Batch(texts(), texts()))
    assert (exposure.public.classes, exposure.public.kind) == (60, "positions")


def test_any_loss_can_be_trained_with():
    model, ids, labels = model_of(classes=3), texts(), torch.tensor([0, 1, 2])
    weights = torch.tensor([1.0, 2.0, 3.0])
    weighted = dm.observe(model, dm.Batch(ids, labels), loss=nn.CrossEntropyLoss(weight=weights))
    assert_same(weighted.update, gradient_of(model, cross_entropy(model(ids), labels, weight=weights)))
    wanted = torch.rand(3, 3)
    squared = dm.observe(model, dm.Batch(ids, wanted), loss=lambda output, target: (output - target).square().mean())
    assert_same(squared.update, gradient_of(model, (model(ids) - wanted).square().mean()))
    with pytest.raises(dm.Refused, match="own loss"):
        dm.recover_labels(weighted, "ilrg")
    with pytest.raises(TypeError, match="expected the name of a loss"):
        dm.observe(model, dm.Batch(ids, labels), loss=3)


def test_plain_losses_of_pytorch_have_their_closed_forms():
    assert loss_of(nn.CrossEntropyLoss(label_smoothing=0.1)) == dm.CrossEntropy(smoothing=0.1)
    assert loss_of(nn.BCEWithLogitsLoss()) == dm.BinaryCrossEntropy()
    assert loss_of(nn.MSELoss()) == dm.SquaredError()
    assert loss_of(nn.MSELoss(reduction="sum")) == dm.SquaredError(over_outputs="sum", over_batch="sum")
    assert isinstance(loss_of(nn.CrossEntropyLoss(reduction="sum")), OwnLoss)
    own, logits = OwnLoss(function=nn.MSELoss()), torch.randn(4, 3)
    assert torch.allclose(own.per_sample(logits, torch.zeros(4, 3)), logits.square().mean(1))
    assert torch.allclose(dm.SquaredError().per_sample(logits, torch.zeros(4, 3)), logits.square().mean(1))


def test_a_refusal_says_what_the_loss_is():
    model, ids = model_of(classes=3), texts()
    losses = {
        "CrossEntropyLoss with weights": (nn.CrossEntropyLoss(weight=torch.ones(3)), torch.tensor([0, 1, 2])),
        "CrossEntropyLoss with targets that it ignores": (nn.CrossEntropyLoss(), torch.tensor([0, -100, 2])),
        "CrossEntropyLoss with reduction 'sum'": (nn.CrossEntropyLoss(reduction="sum"), torch.tensor([0, 1, 2])),
        "MultiMarginLoss": (nn.MultiMarginLoss(), torch.tensor([0, 1, 2])),
        "a function of its own": (lambda z, t: cross_entropy(z, t) + z.square().mean(), torch.tensor([0, 1, 2])),
    }
    for said, (loss, targets) in losses.items():
        with pytest.raises(dm.Refused, match=f"trains with {said}$"):
            dm.recover_labels(dm.observe(model, dm.Batch(ids, targets), loss=loss), "subspace")


def test_an_update_of_a_federation_is_received():
    model, ids = model_of(classes=3), texts()
    update = dm.observe(model, dm.Batch(ids, torch.arange(3))).update
    exposure = dm.receive(model, update, input_shape=(6,), batch_size=3)
    assert dm.recover_tokens(exposure).tokens == set(ids.flatten().tolist())


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (texts(), texts()[:, :4], r"batch.targets: expected \(B, 6\) token ids"),
        (texts(), torch.full((3, 6), 60), r"batch.targets: expected token ids in 0..59, or -100"),
        (texts() + 60, texts(), "model: cannot take torch.int64 inputs"),
        ({"input_ids": texts(), "attention_mask": torch.ones(2, 6)}, texts(), "attention_mask: expected 3 samples"),
        (torch.zeros(3, 6, 6, dtype=torch.uint8), texts(), "divide pixel values by 255"),
        ({"input_ids": SimpleNamespace()}, texts(), "expected tensors, got SimpleNamespace"),
    ],
)
def test_bad_texts_get_one_sentence(inputs, targets, message):
    with pytest.raises((ValueError, TypeError), match=message):
        dm.observe(model_of(), dm.Batch(inputs, targets))
