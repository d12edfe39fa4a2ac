import copy
import math

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.gradients import per_sample_gradients
from dosimeter.client.losses import CrossEntropy
from dosimeter.defenses.dpsgd import ClippedSGD


def _loop(model, batch):
    """Each sample's gradient, one backward pass after the other."""
    pairs = zip(batch.inputs.split(1), batch.targets.split(1))
    return [dm.FedSGD()(model, inputs, targets, CrossEntropy()) for inputs, targets in pairs]


def _norm(update):
    return torch.cat([change.flatten() for change in update.values()]).norm()


def test_per_sample_gradients_agree_with_a_loop(classifier, batch):
    found = per_sample_gradients(classifier, batch.inputs, batch.targets, CrossEntropy())
    for index, expected in enumerate(_loop(classifier, batch)):
        for name, gradient in expected.items():
            assert torch.allclose(found[name][index], gradient, atol=1e-6)


class _Recurrent(nn.Module):
    """Reads an image row by row."""

    def __init__(self):
        super().__init__()
        self.memory, self.classifier = nn.GRU(8, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, images):
        return self.classifier(self.memory(images[:, 0])[0][:, -1])


def test_layers_that_cannot_be_batched_are_gone_through_one_by_one(batch):
    model = _Recurrent()
    found = per_sample_gradients(model, batch.inputs, batch.targets, CrossEntropy())
    for index, expected in enumerate(_loop(model, batch)):
        for name, gradient in expected.items():
            assert torch.allclose(found[name][index], gradient, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Full backward hook")
def test_per_sample_gradients_equal_those_of_opacus(batch):
    grad_sample = pytest.importorskip("opacus.grad_sample", reason="opacus is not installed")
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3, stride=2), nn.GroupNorm(2, 6), nn.ReLU(), nn.Flatten(), nn.Linear(54, 8), nn.Tanh(), nn.Linear(8, 10)
    )
    model.double()
    inputs = batch.inputs.double()
    wrapped = grad_sample.GradSampleModule(model, loss_reduction="mean")
    nn.CrossEntropyLoss()(wrapped(inputs), batch.targets).backward()
    theirs = {name.removeprefix("_module."): p.grad_sample for name, p in wrapped.named_parameters()}
    wrapped.remove_hooks()
    ours = per_sample_gradients(model, inputs, batch.targets, CrossEntropy())
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], rtol=1e-10, atol=1e-12)


def test_the_update_is_the_mean_of_clipped_gradients(classifier, batch):
    gradients = _loop(classifier, batch)
    bound = float(torch.stack([_norm(g) for g in gradients]).median())  # some are clipped, some are not
    sent = dm.observe(classifier, batch, defenses=(dm.defense("dpsgd", max_norm=bound, noise_multiplier=0.0),)).update
    for name, change in sent.items():
        expected = torch.stack([g[name] * min(1.0, bound / float(_norm(g))) for g in gradients]).mean(0)
        assert torch.allclose(change, expected, atol=1e-6)
    assert _norm(sent) < _norm(dm.observe(classifier, batch).update)


def test_a_huge_norm_without_noise_is_fedsgd_to_rounding(classifier, batch):
    plain = dm.observe(classifier, batch).update
    sent = dm.observe(classifier, batch, defenses=(dm.defense("dpsgd", max_norm=1e9, noise_multiplier=0.0),)).update
    for name, change in plain.items():
        assert torch.allclose(sent[name], change, atol=1e-6)


def test_noise_has_the_deviation_of_the_mechanism(classifier, batch):
    quiet = dm.observe(classifier, batch, defenses=(dm.defense("dpsgd", max_norm=0.5, noise_multiplier=0.0),)).update
    loud = dm.observe(classifier, batch, defenses=(dm.defense("dpsgd", max_norm=0.5, noise_multiplier=3.0),)).update
    noise = torch.cat([(loud[name] - quiet[name]).flatten() for name in quiet])
    assert noise.std().item() == pytest.approx(3.0 * 0.5 / len(batch.inputs), rel=0.05)


def test_noise_comes_before_other_update_defenses_wherever_they_stand(classifier, batch):
    private, prune = dm.defense("dpsgd", max_norm=0.5, noise_multiplier=1.0), dm.defense("pruning", ratio=0.9)
    sent = dm.observe(classifier, batch, defenses=(prune, private)).update
    assert (sent["3.weight"] == 0).sum().item() == math.floor(0.9 * sent["3.weight"].numel())


def test_the_server_can_replay_the_clipping_and_differentiate_it(classifier, batch):
    inputs = batch.inputs.double().clone().requires_grad_()
    training, model = ClippedSGD(max_norm=0.5), classifier.double()

    def energy(x):
        update = training(model, x, batch.targets, CrossEntropy(), create_graph=True)
        return torch.stack([change[..., :1].sum() for change in update.values()]).sum()

    slope = torch.autograd.grad(energy(inputs), inputs)[0]
    direction = torch.randn_like(inputs)
    step = 1e-6
    numeric = (energy(inputs + step * direction) - energy(inputs - step * direction)) / (2 * step)
    assert (slope * direction).sum().item() == pytest.approx(numeric.item(), rel=1e-4)


def test_pieces_give_the_same_update(classifier, batch, monkeypatch):
    whole = ClippedSGD(max_norm=0.5)(classifier, batch.inputs, batch.targets, CrossEntropy())
    monkeypatch.setattr("dosimeter.defenses.dpsgd.VALUES_AT_ONCE", 2 * sum(p.numel() for p in classifier.parameters()))
    pieces = ClippedSGD(max_norm=0.5)(classifier, batch.inputs, batch.targets, CrossEntropy())
    for name in whole:
        assert torch.allclose(whole[name], pieces[name], atol=1e-7)


def test_epsilon_at_the_known_point():
    defense = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.1)
    assert defense.epsilon(sample_rate=0.01, steps=100, delta=1e-5) == pytest.approx(0.9561, abs=5e-5)


def test_batch_norm_in_train_mode_is_refused(normed_classifier, batch):
    defense = dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0)
    with pytest.raises(dm.Refused, match="batch norm '1' mixes the batch"):
        dm.observe(normed_classifier, batch, defenses=(defense,))
    assert dm.observe(normed_classifier.eval(), batch, defenses=(defense,)).update


def test_local_steps_are_refused(classifier, batch):
    with pytest.raises(dm.Refused, match="this client runs fedavg"):
        dm.observe(classifier, batch, training=dm.FedAvg(), defenses=(dm.defense("dpsgd", max_norm=1.0, noise_multiplier=1.0),))


def test_noise_without_a_bound_is_refused():
    with pytest.raises(ValueError, match="expected 0 with an infinite max_norm"):
        dm.defense("dpsgd", max_norm=math.inf, noise_multiplier=1.0)


class _Tempered(nn.Module):
    """Logits over a temperature that is learnt: a parameter without any dimension."""

    def __init__(self):
        super().__init__()
        self.classifier, self.temperature = nn.Linear(64, 10), nn.Parameter(torch.tensor(1.5))

    def forward(self, images):
        return self.classifier(images.flatten(1)) / self.temperature


def test_a_parameter_without_dimensions_counts_towards_the_norm(batch):
    model = _Tempered()
    gradients = _loop(model, batch)
    sent = ClippedSGD(max_norm=0.5)(model, batch.inputs, batch.targets, CrossEntropy())
    for name, change in sent.items():
        expected = torch.stack([g[name] * min(1.0, 0.5 / float(_norm(g))) for g in gradients]).mean(0)
        assert change.shape == expected.shape
        assert torch.allclose(change, expected, atol=1e-6)
    assert sent["temperature"] != 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_clips_to_the_bound_and_not_to_nothing(dtype):
    """Gradients of norms far above 256, whose squares float16 cannot hold."""
    rng = torch.Generator().manual_seed(5)
    inputs = (torch.rand(6, 300, generator=rng) * 40).to(dtype)
    model = nn.Linear(300, 5).to(dtype)
    targets = model(inputs).argmin(1)  # what the model believes least, so that every gradient is large
    for one, target in zip(inputs.split(1), targets.split(1)):
        sent = ClippedSGD(max_norm=1.0)(model, one, target, CrossEntropy())
        assert all(change.dtype == dtype for change in sent.values())
        assert float(_norm({name: change.double() for name, change in sent.items()})) == pytest.approx(1, rel=torch.finfo(dtype).eps)
    whole = ClippedSGD(max_norm=1.0)(model, inputs, targets, CrossEntropy())
    exact = ClippedSGD(max_norm=1.0)(copy.deepcopy(model).double(), inputs.double(), targets, CrossEntropy())
    for name, change in whole.items():
        assert torch.allclose(change.double(), exact[name], atol=20 * torch.finfo(dtype).eps * float(exact[name].abs().max()))


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float16, 1e4), (torch.float32, 1e30), (torch.float32, 1e200)])
def test_a_bound_whose_square_overflows_clips_nothing(classifier, batch, dtype, bound):
    model, defense = classifier.to(dtype), dm.defense("dpsgd", max_norm=bound, noise_multiplier=0.0)
    halved = dm.Batch(batch.inputs.to(dtype), batch.targets)
    sent, plain = dm.observe(model, halved, defenses=(defense,)).update, dm.observe(model, halved).update
    for name, change in plain.items():
        assert torch.allclose(sent[name], change, atol=4 * torch.finfo(dtype).eps)


def test_a_tiny_bound_clips_and_does_not_empty(classifier, batch):
    sent = ClippedSGD(max_norm=1e-25)(classifier, batch.inputs[:1], batch.targets[:1], CrossEntropy())
    assert float(_norm({name: change.double() for name, change in sent.items()})) == pytest.approx(1e-25, rel=1e-5)


def test_noise_beyond_the_numbers_is_blamed_on_the_defense(classifier, batch):
    defense = dm.defense("dpsgd", max_norm=1e30, noise_multiplier=1e12)
    with pytest.raises(dm.Refused, match=r"beyond what torch\.float32 can hold"):
        dm.observe(classifier, batch, defenses=(defense,))


def test_the_replay_has_a_slope_where_a_gradient_is_zero(batch):
    """A model that answers the same whatever it sees, with soft labels to match: nothing to clip, and no 0/0."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8))
    nn.init.zeros_(model[1].weight), nn.init.zeros_(model[1].bias)
    inputs = batch.inputs.clone().requires_grad_()
    update = ClippedSGD(max_norm=0.5)(model, inputs, torch.full((len(inputs), 8), 0.125), CrossEntropy(), create_graph=True)
    slope = torch.autograd.grad(torch.stack([change.sum() for change in update.values()]).sum(), inputs)[0]
    assert not any(change.detach().any() for change in update.values())
    assert torch.isfinite(slope).all()
