import copy

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import dosimeter as dm
from dosimeter.randomness import generator, global_seed


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


def test_a_diverged_training_is_said(classifier, batch):
    classifier[5].weight.data.fill_(float("nan"))
    with pytest.raises(ValueError, match=r"update\..*has NaN or infinite entries"):
        dm.observe(classifier, batch)


def test_methods_may_be_named(classifier, batch):
    public = dm.observe(classifier, batch, training="fedavg", loss="focal", defenses=["sign"]).public
    assert (public.training, public.loss, public.defenses) == (dm.FedAvg(), dm.Focal(), (dm.defense("sign"),))
    with pytest.raises(ValueError, match="did you mean 'fedavg'"):
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


@pytest.mark.parametrize("defense", [{"name": "gaussian_noise", "std": 1.0}, {"name": "dpsgd", "max_norm": 1.0, "noise_multiplier": 1.0}])
def test_a_server_that_knows_the_seed_cannot_draw_the_noise_again(classifier, batch, defense):
    """With the right batch the noise can be drawn again; with the seed, the role and any other batch it cannot."""
    options = {key: value for key, value in defense.items() if key != "name"}
    noisy = dm.defense(defense["name"], **options)
    exposure = dm.observe(classifier, batch, defenses=(noisy,), seed=7)
    clean = dm.observe(
        classifier, batch, defenses=(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=0.0),) if "max_norm" in options else ()
    )
    name = "5.weight"
    noise = exposure.update[name] - clean.update[name]
    guessed = dm.Batch(batch.inputs + 1e-3, batch.targets)
    elsewhere = dm.observe(classifier, guessed, defenses=(noisy,), seed=7).update[name] - clean.update[name]
    assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), elsewhere.flatten()]))[0, 1])) < 0.5
    for role in (f"defense 0 {noisy.name}", "training", "labels ilrg"):
        drawn = torch.randn(noise.shape, generator=generator(7, role))
        assert abs(float(torch.corrcoef(torch.stack([noise.flatten(), drawn.flatten()]))[0, 1])) < 0.5


def test_nothing_in_an_exposure_is_the_seed(classifier, batch):
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("gaussian_noise", std=0.1),), seed=987654321)
    assert "987654321" not in repr(exposure.public)


def test_dropout_masks_are_the_clients_secret(batch):
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.Dropout(0.5), torch.nn.Linear(32, 10)).train()
    first, again = dm.observe(model, batch, seed=1), dm.observe(model, batch, seed=1)
    assert all(torch.equal(first.update[name], again.update[name]) for name in first.update)
    with global_seed(1, "training"):
        guessed = dm.FedSGD()(model, batch.inputs, batch.targets, dm.CrossEntropy())
    assert not torch.equal(guessed["1.weight"], first.update["1.weight"])


def test_a_bottleneck_of_the_model_is_drawn_in_public(batch):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10)).train()
    other = dm.Batch(batch.inputs.flip(0), batch.targets)
    one, two = (dm.observe(model, samples, defenses=("precode",), seed=4).model.state_dict() for samples in (batch, other))
    assert all(torch.equal(one[name], two[name]) for name in one)
