"""What is refused of a model, a batch and an update, each in a sentence."""

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.client.checks import check_batch, check_exposure, check_soft_labels, count_classes, defense_list


def test_one_defense_alone_is_a_list_of_one():
    sign = dm.defense("sign")
    assert defense_list("sign") == ("sign",)
    assert defense_list(sign) == (sign,)
    assert defense_list(["sign", sign]) == ["sign", sign]
    for wrong in ({"name": "sign"}, 3):
        with pytest.raises(TypeError, match="expected a list of defenses"):
            defense_list(wrong)  # pyright: ignore[reportArgumentType]


def test_a_good_batch_tells_the_number_of_classes(classifier, normed_classifier, batch):
    assert check_batch(classifier, batch, "batch") == 10
    before = normed_classifier.train()[1].running_mean.clone()
    assert count_classes(normed_classifier, batch.inputs) == 10
    assert torch.equal(normed_classifier[1].running_mean, before)


def test_soft_labels_share_out_a_whole_under_a_softmax_alone():
    each_for_itself = torch.tensor([[1.0, 1.0, 0.0]])
    check_soft_labels(each_for_itself, "labels", dm.BinaryCrossEntropy())
    check_soft_labels(each_for_itself / 2, "labels", dm.CrossEntropy())
    with pytest.raises(ValueError, match="must sum to 1"):
        check_soft_labels(each_for_itself, "labels", dm.CrossEntropy())
    with pytest.raises(ValueError, match="at least 0"):
        check_soft_labels(-each_for_itself, "labels", dm.BinaryCrossEntropy())


def test_a_sum_beyond_the_numbers_of_finite_entries_is_no_divergence(classifier, batch):
    update = dm.observe(classifier, batch).update
    large = torch.full_like(update["5.weight"], 3e38)
    exposure = dm.receive(classifier, update | {"5.weight": large}, input_shape=(1, 8, 8))
    check_exposure(exposure)
    exposure.update["5.weight"][0, 0] = float("inf")
    with pytest.raises(ValueError, match="has NaN or infinite entries"):
        check_exposure(exposure)


@pytest.mark.parametrize("normalization", [dm.Normalization(std=(0.0,)), dm.Normalization(mean=(0.0, 0.0), std=(1.0, 1.0))])
def test_a_normalisation_that_does_not_fit_is_refused(classifier, batch, normalization):
    with pytest.raises(ValueError, match="normalization: expected one mean and one positive std"):
        dm.observe(classifier, batch, normalization=normalization)


def test_inputs_outside_the_normalisation_are_said(classifier, batch):
    with pytest.warns(UserWarning, match="outside what the normalisation maps"):
        dm.observe(classifier, dm.Batch(batch.inputs * 5 - 2, batch.targets))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: dm.Batch(b.inputs[:0], b.targets[:0]), "at least one sample"),
        (lambda b: dm.Batch(b.inputs, b.targets + 9), r"class ids must lie in 0..9, got \d+..1\d"),
        (lambda b: dm.Batch(b.inputs, b.targets - 9), "class ids must lie in 0..9"),
        (lambda b: dm.Batch(b.inputs, b.targets[:2]), "expected 6, one for each input"),
        (lambda b: dm.Batch(b.inputs, b.targets.float()), "class ids must be integers"),
        (lambda b: dm.Batch((b.inputs * 255).to(torch.uint8), b.targets), "divide pixel values by 255"),
        (lambda b: dm.Batch(b.inputs / 0, b.targets), "has NaN or infinite values"),
        (lambda b: dm.Batch(b.inputs[:, :, :5], b.targets), r"model: cannot take torch.float32 inputs of shape \(1, 5, 8\)"),
        (lambda b: dm.Batch(b.inputs.double(), b.targets), "model: cannot take torch.float64 inputs"),
        (lambda b: dm.Batch(b.inputs, b.targets[0]), "expected 6, one for each input"),
        (lambda b: dm.Batch(b.inputs, torch.zeros(6, 10)), "must sum to 1"),
        (lambda b: dm.Batch(b.inputs, torch.rand(6, 7)), r"expected \(B,\) class ids or \(B, 10\) soft labels"),
    ],
)
def test_bad_batches_get_one_sentence(classifier, batch, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dm.observe(classifier, change(batch))


def test_an_update_must_fit_its_model(classifier, batch):
    exposure = dm.observe(classifier, batch)
    for update, sentence in (
        ({"5.weight": torch.zeros(3, 3)}, r"expected shape \(10, 12\)"),
        ({"fc.weight": torch.zeros(3, 3)}, "the model has no parameter 'fc.weight'"),
        ({}, "sent no layer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dm.receive(classifier, update, input_shape=(1, 8, 8))
    check_exposure(exposure)


@pytest.mark.parametrize("answer", [lambda x: {"a": x, "b": x}, lambda x: {}["missing"], lambda x: x.flatten(), lambda x: x.detach()])
def test_a_strange_model_gets_a_sentence(classifier, batch, answer):
    class Strange(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = classifier

        def forward(self, x):
            return answer(self.inner(x))

    with pytest.raises(ValueError, match=r"^model: "):
        dm.observe(Strange(), batch)


def test_a_frozen_model_is_refused(classifier, batch):
    with pytest.raises(ValueError, match="every parameter is frozen"):
        dm.observe(classifier.requires_grad_(False), batch)


def test_a_model_without_parameters_is_refused():
    with pytest.raises(ValueError, match="has no parameters"):
        dm.observe(nn.Flatten(), dm.Batch(torch.rand(2, 1, 2, 2), torch.tensor([0, 1])))


@pytest.mark.parametrize(
    ("convert", "said"),
    [
        (Tensor.to_sparse, "got torch.sparse_coo of torch.float32"),
        (lambda change: change.to(torch.float8_e4m3fn), "got torch.float8_e4m3fn"),
        (lambda change: change.to(torch.complex64), "got torch.complex64"),
        (lambda change: (100 * change).long(), "got torch.int64"),
    ],
)
def test_an_update_of_other_tensors_than_dense_floating_point_is_refused_in_a_sentence(classifier, batch, convert, said):
    update = dm.observe(classifier, batch).update
    with pytest.raises(ValueError, match=f"expected a dense tensor .*{said}"):
        dm.receive(classifier, update | {"5.weight": convert(update["5.weight"])}, input_shape=(1, 8, 8))


def test_a_softmax_over_one_logit_is_refused_as_a_set_up(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    binary = dm.Batch(batch.inputs, batch.targets % 2)
    for loss in ("cross_entropy", "focal"):
        with pytest.raises(ValueError, match=r"over one logit has the gradient zero.*BCEWithLogitsLoss"):
            dm.observe(model, binary, loss=loss)
    update = dm.observe(model, binary, loss="binary_cross_entropy").update
    assert any(change.any() for change in update.values())
    with pytest.raises(ValueError, match="over one logit has the gradient zero"):
        dm.receive(model, update, input_shape=(1, 8, 8))


class WritesIntoItsInput(nn.Module):
    """Doubles its input in place, as a careless preprocessing step does."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

    def forward(self, inputs):
        return self.layers(inputs.mul_(2))


def test_a_model_that_writes_into_its_input_changes_no_batch(batch):
    before, auxiliary = batch.inputs.clone(), dm.Batch(batch.inputs.clone(), batch.targets.clone())
    model = WritesIntoItsInput()
    exposure = dm.observe(model, batch, auxiliary=auxiliary)
    dm.recover_labels(exposure, "posterior")
    dm.recover_features(exposure, "subspace")
    dm.inspect(model, batch=batch)
    dm.audit(model, batch, auxiliary=auxiliary, labels=["llg_star"], features=["subspace"], attacks=[])
    assert torch.equal(batch.inputs, before)
    assert torch.equal(auxiliary.inputs, before)


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (lambda model, _: nn.DataParallel(model), "expected the model itself, got a DataParallel"),
        (lambda model, _: torch.jit.script(model), "got a scripted or traced one"),
        (lambda model, inputs: torch.jit.trace(model, inputs), "got a scripted or traced one"),
    ],
)
def test_models_that_cannot_be_taken_apart_are_refused(classifier, batch, wrap, message):
    with pytest.raises(TypeError, match=message):
        check_batch(wrap(classifier, batch.inputs), batch, "batch")


@pytest.mark.parametrize("parameter", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, device="meta")])
def test_parameters_that_are_no_real_numbers_are_refused(classifier, batch, parameter):
    classifier.register_parameter("odd", nn.Parameter(parameter))
    with pytest.raises(ValueError, match="model: parameter 'odd'"):
        check_batch(classifier, batch, "batch")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"auxiliary": 3}, "auxiliary: expected a Batch, got int"),
        ({"normalization": dm.Normalization(std=(0.0,))}, "normalization: expected one mean and one positive std"),
        ({"normalization": dm.Normalization(mean=(0.0, 0.0))}, "normalization: expected one mean and one positive std"),
        ({"normalization": 3}, "normalization: expected Normalization, got 3"),
    ],
)
def test_what_is_received_is_checked_too(classifier, batch, options, message):
    update = dm.observe(classifier, batch).update
    with pytest.raises((TypeError, ValueError), match=message):
        dm.receive(classifier, update, input_shape=(1, 8, 8), **options)
