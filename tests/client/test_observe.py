import copy

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import dosimeter as dm
from dosimeter.client.checks import check_exposure


def test_the_server_cannot_reach_the_batch(classifier, batch):
    exposure = dm.observe(classifier, batch, auxiliary=dm.Batch(batch.inputs, batch.targets))
    before = copy.deepcopy((exposure.update, exposure.auxiliary, exposure.model.state_dict()))
    batch.inputs.uniform_()
    batch.targets.zero_()
    for parameter in classifier.parameters():
        parameter.data.zero_()
    assert all(torch.equal(before[0][name], exposure.update[name]) for name in before[0])
    assert torch.equal(before[1].inputs, exposure.auxiliary.inputs)
    assert all(torch.equal(before[2][name], value) for name, value in exposure.model.state_dict().items())


def test_a_batch_comes_from_any_torch_dataset(classifier, batch):
    dataset = TensorDataset(batch.inputs, batch.targets)
    loaded = dm.Batch(*next(iter(DataLoader(dataset, batch_size=len(dataset)))))
    expected, found = dm.observe(classifier, batch).update, dm.observe(classifier, loaded).update
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_nothing_in_an_exposure_refers_to_the_batch(classifier, batch):
    """Walk every object that the exposure can reach: none may share memory with the private tensors."""
    import gc

    exposure = dm.observe(classifier, batch, defenses=(dm.defense("gaussian_noise", std=0.1), dm.defense("clipping", max_norm=1.0)))
    private = {batch.inputs.untyped_storage().data_ptr(), batch.targets.untyped_storage().data_ptr()}
    seen, stack = set(), [exposure]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, type) or type(thing).__name__ == "module":
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            assert thing.untyped_storage().data_ptr() not in private
            continue
        if type(thing).__name__ in {"function", "builtin_function_or_method"}:
            stack.extend(cell.cell_contents for cell in thing.__closure__ or ()) if hasattr(thing, "__closure__") else None
            continue
        stack.extend(gc.get_referents(thing))


def test_same_seed_same_update_bit_for_bit(classifier, batch):
    noise = (dm.defense("gaussian_noise", std=0.1),)
    first, again, other = (dm.observe(classifier, batch, defenses=noise, seed=seed).update for seed in (3, 3, 4))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["5.weight"], other["5.weight"])


def test_mode_and_batch_size_are_public(normed_classifier, batch):
    public = dm.observe(normed_classifier.train(), batch).public
    assert (public.train_mode, public.batch_size, public.classes, public.input_shape) == (True, 6, 10, (1, 8, 8))
    public = dm.observe(normed_classifier.eval(), batch, declare_batch_size=False).public
    assert (public.train_mode, public.batch_size) == (False, None)


def test_receive_takes_a_real_update(classifier, batch):
    sent = dm.observe(classifier, batch)
    exposure = dm.receive(classifier, sent.update, input_shape=(1, 8, 8), batch_size=6)
    assert exposure.public.classes == 10
    assert all(torch.equal(sent.update[name], exposure.update[name]) for name in sent.update)


def test_inputs_outside_the_normalisation_are_said(classifier, batch):
    with pytest.warns(UserWarning, match="outside what the normalisation maps"):
        dm.observe(classifier, dm.Batch(batch.inputs * 5 - 2, batch.targets))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda b: dm.Batch(b.inputs[:0], b.targets[:0]), "batch.inputs: expected a batch of at least one sample"),
        (lambda b: dm.Batch(b.inputs, b.targets + 9), r"batch.targets: class ids must lie in 0..9, got \d+..1\d"),
        (lambda b: dm.Batch(b.inputs, b.targets - 9), r"batch.targets: class ids must lie in 0..9"),
        (lambda b: dm.Batch(b.inputs, b.targets[:2]), r"batch.targets: expected 6, one for each input, got shape \(2,\)"),
        (lambda b: dm.Batch(b.inputs, b.targets.float()), "class ids must be integers"),
        (lambda b: dm.Batch((b.inputs * 255).to(torch.uint8), b.targets), "divide pixel values by 255"),
        (lambda b: dm.Batch(b.inputs / 0, b.targets), "has NaN or infinite values"),
        (lambda b: dm.Batch(b.inputs[:, :, :5], b.targets), r"model: cannot take torch.float32 inputs of shape \(1, 5, 8\)"),
        (lambda b: dm.Batch(b.inputs.double(), b.targets), "model: cannot take torch.float64 inputs"),
        (lambda b: dm.Batch(b.inputs, b.targets[0]), r"batch.targets: expected 6, one for each input, got shape \(\)"),
        (lambda b: dm.Batch(b.inputs, torch.zeros(6, 10)), "each soft label must sum to 1, got sums from 0 to 0"),
        (lambda b: dm.Batch(b.inputs, torch.rand(6, 7)), r"expected \(B,\) class ids or \(B, 10\) soft labels"),
    ],
)
def test_bad_batches_get_one_sentence(classifier, batch, change, sentence):
    with pytest.raises(ValueError, match=sentence):
        dm.observe(classifier, change(batch))


def test_a_diverged_training_is_said(classifier, batch):
    classifier[5].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"update\..*has NaN or infinite entries"):
        dm.observe(classifier, batch)


def test_an_update_must_fit_its_model(classifier, batch):
    exposure = dm.observe(classifier, batch)
    for update, sentence in (
        ({"5.weight": torch.zeros(3, 3)}, r"update.5.weight: expected shape \(10, 12\) as in the model, got \(3, 3\)"),
        ({"fc.weight": torch.zeros(3, 3)}, "the model has no parameter 'fc.weight'"),
        ({}, "sent no layer"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dm.receive(classifier, update, input_shape=(1, 8, 8))
    check_exposure(exposure)


def test_methods_may_be_named(classifier, batch):
    public = dm.observe(classifier, batch, training="fedavg", loss="focal", defenses=["sign"]).public
    assert (public.training, public.loss, public.defenses) == (dm.FedAvg(), dm.Focal(), (dm.defense("sign"),))
    with pytest.raises(ValueError, match="no training named 'fedagv'; did you mean 'fedavg'"):
        dm.observe(classifier, batch, training="fedagv")


def test_what_was_received_is_checked(classifier, batch):
    update = dm.observe(classifier, batch).update
    for wrong, sentence in (
        ({"batch_size": 0}, "batch_size: expected a positive int, got 0"),
        ({"batch_size": 2.5}, "batch_size: expected an int, got 2.5"),
        ({"input_shape": 64}, "input_shape: expected a list, got 64"),
    ):
        with pytest.raises(ValueError, match=sentence):
            dm.receive(classifier, update, **({"input_shape": (1, 8, 8)} | wrong))
    with pytest.raises(TypeError, match="update: expected tensors by parameter name"):
        dm.receive(classifier, [1, 2], input_shape=(1, 8, 8))


@pytest.mark.parametrize("answer", [lambda x: (x, x), lambda x: {}["missing"], lambda x: x.flatten(), lambda x: x.detach()])
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
    with pytest.raises(ValueError, match=f"expected a dense tensor of half, single or double precision, {said}"):
        dm.receive(classifier, update | {"5.weight": convert(update["5.weight"])}, input_shape=(1, 8, 8))
