"""Several labels a sample, class weights and single logits: exact labels from the head's gradient."""

import pytest
import torch
from torch import nn

import dosimeter as dm


def model_of(outputs, seed=0, width=64, activation=nn.ReLU, *rest):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, width), activation(), nn.Linear(width, outputs), *rest)


def pictures(seed, count=4):
    return torch.rand(count, 1, 8, 8, generator=torch.Generator().manual_seed(seed))


def vectors(seed, count=4, labels=12):
    return (torch.rand(count, labels, generator=torch.Generator().manual_seed(seed)) > 0.6).float()


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Tanh])
def test_label_vectors_are_exact_certified_and_counted(activation):
    for seed in (0, 1):
        batch = dm.Batch(pictures(seed), vectors(seed))
        exposure = dm.observe(model_of(12, seed, 64, activation), batch, loss=nn.BCEWithLogitsLoss())
        found = dm.recover_labels(exposure, "head_slopes")
        assert found.certified
        assert torch.equal(found.counts, batch.targets.sum(0).long())
        assert sorted(found.soft.tolist()) == sorted(batch.targets.tolist())
        scores = dm.score(found, batch, exposure=exposure)
        assert scores["insacc"].tolist() == [1.0]
        assert scores["label_l1"].tolist() == [0.0] * 4
        assert scores.nulls["prior"]["insacc"][0] < 0.9
        assert "false_certificates" not in scores.details
        assert dm.score(found, dm.Batch(batch.inputs, 1 - batch.targets), exposure=exposure).details["false_certificates"] == 1


def test_more_samples_than_equations_need_the_zeros_of_a_relu():
    batch = dm.Batch(pictures(3), vectors(3, labels=5))
    found = dm.recover_labels(dm.observe(model_of(5, width=128), batch, loss="binary_cross_entropy"), "head_slopes")
    assert found.certified
    assert sorted(found.soft.tolist()) == sorted(batch.targets.tolist())
    with pytest.raises(dm.Refused, match=r"more than 2 samples leave the equations of 5 labels undetermined.*any invertible mixing"):
        dm.recover_labels(dm.observe(model_of(5, 0, 128, nn.Tanh), batch, loss="binary_cross_entropy"), "head_slopes")


def test_class_weights_leave_the_labels_exact():
    labels = torch.tensor([1, 7, 3, 3])
    exposure = dm.observe(model_of(10, width=128), dm.Batch(pictures(4), labels), loss=nn.CrossEntropyLoss(weight=torch.arange(1.0, 11.0)))
    found = dm.recover_labels(exposure, "head_slopes")
    assert found.certified
    assert sorted(found.labels.tolist()) == [1, 3, 3, 7]


@pytest.mark.parametrize("rest", [(), (nn.Flatten(0),)])
def test_one_logit_tells_the_label_of_one_sample(rest):
    for label in (0.0, 1.0):
        target = torch.full((1,) if rest else (1, 1), label)
        exposure = dm.observe(model_of(1, 0, 64, nn.GELU, *rest), dm.Batch(pictures(5, 1), target), loss=nn.BCEWithLogitsLoss())
        found = dm.recover_labels(exposure, "head_slopes")
        assert found.certified
        assert found.labels.tolist() == [int(label)]


def test_an_undeclared_batch_behind_one_logit_is_refused():
    """One logit gives every batch a gradient of rank one: nothing tells one sample from many."""
    batch = dm.Batch(pictures(6, 3), torch.tensor([[1.0], [0.0], [1.0]]))
    exposure = dm.observe(model_of(1), batch, loss="binary_cross_entropy", declare_batch_size=False)
    with pytest.raises(dm.Refused, match="any larger batch looks like this"):
        dm.recover_labels(exposure, "head_slopes")


@pytest.mark.parametrize("seed", [2, 3])
def test_plain_cross_entropy_with_nearly_as_many_samples_as_classes(seed):
    """One sample less than classes leaves `subspace` no equation. The zeros behind the ReLU separate all samples, two of one class too."""
    labels = torch.tensor([0, 1, 2, 3, 4, 4, 5, 6, 7])
    exposure = dm.observe(model_of(10, seed, 256), dm.Batch(pictures(seed, 9), labels))
    assert not dm.recover_labels(exposure, "subspace").certified
    found = dm.recover_labels(exposure, "head_slopes")
    assert found.certified
    assert found.labels.tolist() == labels.tolist()
    assert found.details["proved"].tolist() == torch.bincount(labels, minlength=10).tolist()


def test_an_audit_shows_label_vectors_as_leaked():
    batch = dm.Batch(pictures(7), vectors(7))
    audit = dm.audit(
        model_of(12), batch, loss=nn.BCEWithLogitsLoss(), labels=["head_slopes"], features=["head_slopes"], maps=[], attacks=[]
    )
    assert {record.surface: record.verdict for record in audit.records} == {"labels": "leaked", "features": "leaked"}


@pytest.mark.parametrize("loss", ["binary_cross_entropy", "weights"])
def test_without_a_declared_size_a_duplicate_may_be_there_and_no_count_is_proved(loss):
    inputs = pictures(5)
    inputs[1] = inputs[0]
    targets = vectors(5)
    targets[1] = targets[0]
    if loss == "weights":
        targets, loss = torch.tensor([3, 3, 1, 0]), nn.CrossEntropyLoss(weight=torch.linspace(0.5, 2, 12))
    found = dm.recover_labels(
        dm.observe(model_of(12, 0, 256), dm.Batch(inputs, targets), loss=loss, declare_batch_size=False), "head_slopes"
    )
    true = targets.sum(0).long() if targets.ndim == 2 else torch.bincount(targets, minlength=12)
    assert not found.certified
    assert bool((found.details["proved"] <= true).all())


def test_two_classes_show_one_direction_of_any_batch():
    loss = nn.CrossEntropyLoss(weight=torch.tensor([0.5, 2.0]))
    exposure = dm.observe(model_of(2), dm.Batch(pictures(6), torch.tensor([0, 1, 1, 0])), loss=loss, declare_batch_size=False)
    with pytest.raises(dm.Refused, match="any larger batch looks like this"):
        dm.recover_features(exposure, "head_slopes")


@pytest.mark.parametrize(("activation", "bias"), [(nn.Tanh, True), (nn.ReLU, True), (nn.ReLU, False)])
def test_a_head_whose_biases_are_zero_tells_a_sample_from_its_mirror_image(activation, bias):
    """σ(−z) = 1 − σ(z): −f with every label exchanged has the same gradient at the weight, as in heads of Transformers."""
    for seed in range(3):
        batch = dm.Batch(pictures(seed, 3), vectors(seed, 3))
        model = model_of(12, seed, 48, activation)
        model[3] = nn.Linear(48, 12, bias=bias)
        nn.init.zeros_(model[3].bias) if bias else None
        exposure = dm.observe(model, batch, loss=nn.BCEWithLogitsLoss())
        found, features = dm.recover_labels(exposure, "head_slopes"), dm.recover_features(exposure, "head_slopes")
        assert found.certified
        assert sorted(found.soft.tolist()) == sorted(batch.targets.tolist())
        assert bool(features.certified.all())
        assert "false_certificates" not in dm.score(found, batch, exposure=exposure).details
        assert dm.score(features, batch, exposure=exposure).details["false_certificates"] == 0


def test_without_any_bias_and_with_features_of_both_signs_nothing_is_proved():
    batch, model = dm.Batch(pictures(1, 3), vectors(1, 3)), model_of(12, 1, 48, nn.Tanh)
    model[3] = nn.Linear(48, 12, bias=False)
    exposure = dm.observe(model, batch, loss=nn.BCEWithLogitsLoss())
    found = dm.recover_labels(exposure, "head_slopes")
    assert not found.certified
    assert int(found.details["proved"].sum()) == 0
    assert "mirror image" in found.message
    assert not bool(dm.recover_features(exposure, "head_slopes").certified.any())


OWN_LOSSES = {
    "positive weights": (nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 13.0)), (), vectors(3)),
    "summed": (nn.BCEWithLogitsLoss(reduction="sum"), (), vectors(4)),
    "sigmoid": (nn.BCELoss(), (nn.Sigmoid(),), vectors(5)),
    "weights and smoothing": (nn.CrossEntropyLoss(weight=torch.arange(1.0, 13.0), label_smoothing=0.1), (), torch.tensor([1, 7, 3, 11])),
    "margin": (nn.MultiMarginLoss(), (), torch.tensor([1, 7, 3, 11])),
    "log-softmax": (lambda outputs, targets: nn.functional.nll_loss(outputs, targets), (nn.LogSoftmax(1),), torch.tensor([0, 2, 5, 9])),
}


@pytest.mark.parametrize("case", OWN_LOSSES)
def test_slopes_name_the_labels_under_losses_of_the_clients_own(case):
    loss, rest, targets = OWN_LOSSES[case]
    batch = dm.Batch(pictures(6), targets)
    exposure = dm.observe(model_of(12, 2, 160, nn.ReLU, *rest).eval(), batch, loss=loss)
    found, features = dm.recover_labels(exposure, "head_slopes"), dm.recover_features(exposure, "head_slopes")
    assert found.certified
    assert torch.equal(found.counts, targets.sum(0).long() if targets.ndim == 2 else torch.bincount(targets, minlength=12))
    assert bool(features.certified.all())
    assert dm.score(features, batch, exposure=exposure).details["false_certificates"] == 0


def test_labels_that_no_slope_has_are_not_named():
    """Labels of .3 and .7 under positive weights: every slope has a sign, and none is that of a vector of zeros and ones."""
    batch = dm.Batch(pictures(6), 0.3 + 0.4 * vectors(3))
    exposure = dm.observe(model_of(12, 2, 160), batch, loss=nn.BCEWithLogitsLoss(pos_weight=torch.arange(1.0, 13.0)))
    with pytest.raises(dm.Refused, match="no label vector of zeros and ones"):
        dm.recover_labels(exposure, "head_slopes")


def test_label_vectors_under_a_sigmoid_of_the_model_need_no_relu():
    batch = dm.Batch(pictures(7), vectors(7))
    exposure = dm.observe(model_of(12, 3, 64, nn.GELU, nn.Sigmoid()).eval(), batch, loss=nn.BCELoss())
    found = dm.recover_labels(exposure, "head_slopes")
    assert found.certified
    assert sorted(found.soft.tolist()) == sorted(batch.targets.tolist())


@pytest.mark.parametrize("shape", [(1,), (1, 1)])
@pytest.mark.parametrize("label", [0.0, 1.0])
def test_a_single_logit_is_scored_as_two_classes(shape, label):
    """Targets (B,) or (B, 1) of zeros and ones are labels, and a certified sample of label 1 is not refuted by them."""
    model = model_of(1, 4, 64, nn.ReLU, *(() if len(shape) == 2 else (nn.Flatten(0),)))
    batch = dm.Batch(pictures(8, 1), torch.full(shape, label))
    exposure = dm.observe(model, batch, loss=nn.BCEWithLogitsLoss())
    found, features = dm.recover_labels(exposure, "head_slopes"), dm.recover_features(exposure, "head_slopes")
    assert found.certified
    assert dm.score(found, batch, exposure=exposure)["insacc"].tolist() == [1.0]
    assert dm.score(features, batch, exposure=exposure).details["false_certificates"] == 0
    assert dm.score(found, dm.Batch(batch.inputs, 1 - batch.targets), exposure=exposure).details["false_certificates"] == 1
