"""Laws over every defense: nothing is mutated, the seed decides, weak settings change nothing, odd updates pass."""

import copy
import math
from contextlib import suppress
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.defenses.outgoing import OutgoingDefense
from dosimeter.randomness import generator
from dosimeter.registry import DEFENSES

EXAMPLES = {  # a setting of every defense that does something
    "bias_free_head": {},
    "bias_withheld": {},
    "blur": {"sigma": 1.0},
    "clipping": {"max_norm": 0.1},
    "dpsgd": {"max_norm": 0.5, "noise_multiplier": 1.0},
    "dropout": {"rate": 0.5},
    "fewer_channels": {"kept": 0.5},
    "gaussian_noise": {"std": 0.1},
    "dp_pixelation": {"block": 2, "epsilon": 5.0},
    "head_row_noise": {"std": 0.1},
    "head_withheld": {},
    "instahide": {"images": 3},
    "label_smoothing": {"smoothing": 0.2},
    "laplace_noise": {"scale": 0.1},
    "local_iterations": {"steps": 3, "learning_rate": 0.1},
    "low_rank": {"rank": 2},
    "mixup": {},
    "only_layer": {"layer": "5"},
    "pixelation": {"block": 3},
    "precode": {"width": 7},
    "pruning": {"ratio": 0.7},
    "quantisation": {"bits": 4},
    "random_labels": {"epsilon": 0.1},
    "secure_aggregation": {"clients": 3},
    "simulated_head": {},
    "sign": {},
    "soteria": {"ratio": 0.5},
}
EXAMPLES |= {name: dict((DEFENSES.entry(name).strengths or ({},))[-1]) for name in DEFENSES if name not in EXAMPLES}  # what it says itself
IDENTITIES = [  # settings so weak that the update must come back bit for bit
    ("blur", {"sigma": 0.0}),
    ("clipping", {"max_norm": math.inf}),
    ("clipping", {"max_norm": math.inf, "mode": "value"}),
    ("clipping", {"max_norm": math.inf, "mode": "layer"}),
    ("dpsgd", {"max_norm": math.inf, "noise_multiplier": 0.0}),
    ("dropout", {"rate": 0.0}),
    ("fewer_channels", {"kept": 1.0}),
    ("gaussian_noise", {"std": 0.0}),
    ("gaussian_noise", {"std": 0.0, "relative": True}),
    ("label_smoothing", {"smoothing": 0.0}),
    ("laplace_noise", {"scale": 0.0}),
    ("local_iterations", {"steps": 1}),
    ("low_rank", {"rank": 10_000}),
    ("pixelation", {"block": 1}),
    ("pruning", {"ratio": 0.0}),
    ("pruning", {"ratio": 0.0, "scope": "update"}),
    ("quantisation", {"bits": 32}),
    ("quantisation", {"bits": 32, "stochastic": True}),
    ("random_labels", {"epsilon": math.inf}),
    ("secure_aggregation", {"clients": 1}),
    ("soteria", {"ratio": 0.0}),
]
OUTGOING = [
    *((name, options) for name, options in EXAMPLES.items() if issubclass(DEFENSES.entry(name), OutgoingDefense)),
    ("clipping", {"max_norm": 0.1, "mode": "value"}),
    ("clipping", {"max_norm": 0.1, "mode": "layer"}),
    ("gaussian_noise", {"std": 0.1, "relative": True}),
    ("laplace_noise", {"scale": 0.1, "relative": True}),
    ("low_rank", {"rank": 1, "iterations": 3}),
    ("pruning", {"ratio": 0.999}),
    ("pruning", {"ratio": 1.0}),
    ("pruning", {"ratio": 0.5, "scope": "update"}),
    ("quantisation", {"bits": 2, "stochastic": True}),
    ("quantisation", {"bits": 31}),
    ("sign", {"scaled": False}),
]
shapes = st.lists(st.integers(0, 5), max_size=4).map(tuple)
dtypes = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])
fillings = st.sampled_from(["normal", "zero", "constant", "negative zero", "tiny", "one spike"])


@st.composite
def updates(draw):
    """Random layers, some of them empty, zero or constant; perhaps none at all."""
    source = torch.Generator().manual_seed(draw(st.integers(0, 2**20)))
    return {f"layer{i}": _filled(draw(shapes), draw(dtypes), draw(fillings), source) for i in range(draw(st.integers(0, 4)))}


def _filled(shape, dtype, filling, source):
    normal = torch.randn(shape, generator=source).to(dtype)
    match filling:
        case "zero":
            return torch.zeros_like(normal)
        case "constant":
            return torch.full_like(normal, 0.5)
        case "negative zero":
            return torch.full_like(normal, -0.0)
        case "tiny":
            return torch.full_like(normal, torch.finfo(dtype).tiny)
        case "one spike":
            spike = torch.zeros_like(normal)
            spike.view(-1)[:1] = 100.0
            return spike
    return normal


def _same_bits(first, second):
    return list(first) == list(second) and all(
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8))
        for a, b in zip(first.values(), second.values())
    )


def _copied(update):
    return {name: change.clone() for name, change in update.items()}


@pytest.fixture
def training_classifier(classifier) -> nn.Module:
    return classifier.train()


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_defense_says_its_side_its_promise_and_its_price(name):
    entry = DEFENSES.entry(name)
    assert entry.side in ("data", "model", "training", "update")
    assert len(entry.promise) > 10
    assert len(entry.breaks) > 10


@pytest.mark.parametrize(("name", "options"), OUTGOING)
@settings(max_examples=25, deadline=None)
@given(update=updates(), seed=st.integers(0, 2**20))
def test_odd_updates_pass_and_keep_their_form(name, options, update, seed):
    before = _copied(update)
    defense = dm.defense(name, **options)
    sent = defense.protect(update, generator(seed, "first"))
    again = defense.protect(update, generator(seed, "first"))
    assert _same_bits(update, before)
    assert _same_bits(sent, again)
    assert {k: (v.shape, v.dtype) for k, v in sent.items()} == {k: (v.shape, v.dtype) for k, v in update.items()}
    assert all(torch.isfinite(change).all() for change in sent.values())


@pytest.mark.parametrize(("name", "options"), [pair for pair in IDENTITIES if issubclass(DEFENSES.entry(pair[0]), OutgoingDefense)])
@settings(max_examples=25, deadline=None)
@given(update=updates())
def test_weak_settings_are_the_identity_on_any_update(name, options, update):
    assert _same_bits(dm.defense(name, **options).protect(update, generator(0, "law")), update)


@pytest.mark.parametrize(("name", "options"), IDENTITIES)
def test_weak_settings_leave_the_exposure_bit_for_bit(name, options, training_classifier, batch):
    plain = dm.observe(training_classifier, batch, seed=4)
    behind = dm.observe(training_classifier, batch, defenses=(dm.defense(name, **options),), seed=4)
    assert _same_bits(plain.update, behind.update)


@pytest.mark.parametrize("name", EXAMPLES)
def test_defenses_change_the_update_but_neither_model_nor_batch(name, training_classifier, batch):
    state = copy.deepcopy(training_classifier.state_dict())
    kept = dm.Batch(batch.inputs.clone(), batch.targets.clone())
    plain = dm.observe(training_classifier, batch, seed=4)
    behind = dm.observe(training_classifier, batch, defenses=(dm.defense(name, **EXAMPLES[name]),), seed=4)
    assert _same_bits(plain.update, behind.update) == (name == "unmodelled")  # which stands for what a real client did
    assert torch.equal(batch.inputs, kept.inputs)
    assert torch.equal(batch.targets, kept.targets)
    assert _same_bits(dict(training_classifier.state_dict()), dict(state))
    assert not training_classifier[-1]._forward_pre_hooks
    assert [defense.name for defense in behind.public.defenses] == [name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_defense_returns_a_new_client_and_leaves_the_given_one(name, client):
    client.model.train()
    state, inputs, targets = copy.deepcopy(client.model.state_dict()), client.batch.inputs.clone(), client.batch.targets.clone()
    fields = vars(client).copy()
    defended = dm.defense(name, **EXAMPLES[name])(client, generator(0, "law"))
    defended.training(defended.model, defended.batch.inputs, defended.batch.targets, defended.loss)
    assert all(vars(client)[field] is value for field, value in fields.items())
    assert _same_bits(dict(client.model.state_dict()), dict(state))
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in client.model.modules())
    assert torch.equal(client.batch.inputs, inputs)
    assert torch.equal(client.batch.targets, targets)


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_seed_alone_decides(name, training_classifier, batch):
    defense = dm.defense(name, **EXAMPLES[name])
    first = dm.observe(training_classifier, batch, defenses=(defense,), seed=5)
    torch.manual_seed(123)
    second = dm.observe(training_classifier, batch, defenses=(defense,), seed=5)
    assert _same_bits(first.update, second.update)


@pytest.mark.parametrize("name", ["gaussian_noise", "laplace_noise", "dpsgd", "dropout", "mixup", "instahide", "random_labels", "precode"])
def test_another_seed_gives_other_noise(name, training_classifier, batch):
    defense = dm.defense(name, **EXAMPLES[name])
    updates = [dm.observe(training_classifier, batch, defenses=(defense,), seed=seed).update for seed in range(2)]
    assert not _same_bits(*updates)


@pytest.mark.parametrize("name", ["gaussian_noise", "dropout", "mixup"])
def test_the_global_stream_is_given_back(name, training_classifier, batch):
    torch.manual_seed(77)
    expected = torch.rand(3)
    torch.manual_seed(77)
    dm.observe(training_classifier, batch, defenses=(dm.defense(name, **EXAMPLES[name]),))
    assert torch.equal(torch.rand(3), expected)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@pytest.mark.parametrize("name", ["head_withheld", "bias_withheld", "only_layer", "soteria"])
def test_defenses_that_know_the_model_take_any_subset_of_its_layers(name, client, data):
    (protect,) = dm.defense(name, **EXAMPLES[name])(client, generator(0, "law")).outgoing
    whole = {parameter: p.detach() for parameter, p in client.model.named_parameters()}
    sent = protect(whole)
    part = {key: whole[key] for key in whole if data.draw(st.booleans())}
    before = _copied(part)
    assert _same_bits(protect(part), {key: sent[key] for key in part if key in sent})
    assert _same_bits(part, before)


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in ("secure_aggregation",)])
def test_any_defense_stands_before_and_after_noise(name, training_classifier, batch):
    defense, noise = dm.defense(name, **EXAMPLES[name]), dm.defense("gaussian_noise", std=0.01)
    for order in ((defense, noise), (noise, defense)):
        exposure = dm.observe(training_classifier, batch, defenses=order, seed=6)
        assert exposure.public.defenses == order
        assert all(torch.isfinite(change).all() for change in exposure.update.values())


def test_update_defenses_act_in_the_order_of_the_list(training_classifier, batch):
    clip, noise = dm.defense("clipping", max_norm=0.01), dm.defense("gaussian_noise", std=1.0)

    def norm(*defenses):
        update = dm.observe(training_classifier, batch, defenses=defenses, seed=7).update
        return torch.cat([change.flatten() for change in update.values()]).norm().item()

    entries = sum(p.numel() for p in training_classifier.parameters())
    assert norm(clip, noise) == pytest.approx(entries**0.5, rel=0.1)
    assert norm(noise, clip) == pytest.approx(0.01, rel=1e-4)


def test_data_and_model_defenses_act_before_training_wherever_they_stand(training_classifier, batch):
    smoothing, bias_free, clip = dm.defense("pixelation", block=2), dm.defense("bias_free_head"), dm.defense("clipping", max_norm=0.1)
    first = dm.observe(training_classifier, batch, defenses=(smoothing, bias_free, clip), seed=8)
    last = dm.observe(training_classifier, batch, defenses=(clip, bias_free, smoothing), seed=8)
    assert _same_bits(first.update, last.update)


def test_public_shows_what_the_client_runs_after_its_defenses(training_classifier, batch):
    defenses = (dm.defense("label_smoothing", smoothing=0.1), dm.defense("local_iterations", steps=4), dm.defense("bias_free_head"))
    exposure = dm.observe(training_classifier, batch, defenses=defenses)
    assert exposure.public.loss == CrossEntropy(smoothing=0.1)
    assert exposure.public.training == dm.FedAvg(steps=4)
    assert "5.bias" not in dict(exposure.model.named_parameters())
    assert "5.bias" in dict(training_classifier.named_parameters())


@pytest.mark.parametrize("name", EXAMPLES)
def test_degenerate_batches_pass_or_are_refused_with_a_reason(name, training_classifier, batch):
    defense = dm.defense(name, **EXAMPLES[name])
    for odd in (
        dm.Batch(batch.inputs[:1], batch.targets[:1]),
        dm.Batch(torch.zeros_like(batch.inputs), torch.zeros_like(batch.targets)),
        replace(batch, targets=torch.full((len(batch.inputs), 10), 0.1)),
    ):
        with suppress(dm.Refused):
            exposure = dm.observe(training_classifier, odd, defenses=(defense,), seed=9)
            assert all(torch.isfinite(change).all() for change in exposure.update.values())


@st.composite
def subjects(draw):
    """A small classifier of random width and dtype, in either mode, and a batch of images with hard or soft labels."""
    torch.manual_seed(draw(st.integers(0, 2**20)))
    channels, side, classes = draw(st.integers(1, 3)), draw(st.integers(3, 7)), draw(st.integers(2, 6))
    dtype, bias = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.booleans())
    layers = [nn.Conv2d(channels, draw(st.integers(1, 4)), 3, padding=1, bias=bias), nn.ReLU(), nn.Flatten()]
    model = nn.Sequential(*layers, nn.LazyLinear(5), nn.ReLU(), nn.Linear(5, classes, bias=bias))
    size = draw(st.integers(1, 5))
    inputs = torch.rand(size, channels, side, side)
    model(inputs)  # gives the lazy layer its shape
    targets = torch.randint(0, classes, (size,)) if draw(st.booleans()) else torch.rand(size, classes, dtype=dtype).softmax(1)
    inputs = inputs * draw(st.sampled_from([0.0, 1.0]))  # all black is degenerate
    return model.to(dtype).train(draw(st.booleans())), dm.Batch(inputs.to(dtype), targets)


@pytest.mark.parametrize("name", EXAMPLES)
@settings(max_examples=10, deadline=None)
@given(subject=subjects(), seed=st.integers(0, 99))
def test_any_small_model_and_batch_pass_or_are_refused_with_a_reason(name, subject, seed):
    model, batch = subject
    defense = dm.defense(name, **EXAMPLES[name])
    before, state = batch.inputs.clone(), copy.deepcopy(model.state_dict())
    try:
        exposure = dm.observe(model, batch, defenses=(defense,), seed=seed)
    except dm.Refused as refusal:
        assert len(str(refusal)) > 20  # noqa: PT017
        return
    parameters = dict(exposure.model.named_parameters())
    assert exposure.update.keys() <= parameters.keys()
    for key, change in exposure.update.items():
        assert (change.shape, change.dtype) == (parameters[key].shape, parameters[key].dtype)
        assert bool(torch.isfinite(change).all())
    assert torch.equal(batch.inputs, before)
    assert _same_bits(dict(model.state_dict()), dict(state))


@pytest.mark.parametrize("name", ["head_withheld", "bias_withheld", "bias_free_head", "dropout", "fewer_channels", "precode", "soteria"])
def test_a_model_without_a_head_is_refused(name, batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.Softmax(1))
    with pytest.raises(dm.Refused, match=r"is not the model's output"):
        dm.observe(model, batch, defenses=(dm.defense(name, **EXAMPLES[name]),))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("gaussian_noise", {"std": math.inf}),
        ("laplace_noise", {"scale": math.inf}),
        ("dpsgd", {"max_norm": 1.0, "noise_multiplier": math.inf}),
        ("blur", {"sigma": math.inf}),
        ("mixup", {"alpha": math.inf}),
    ],
)
def test_sizes_without_end_are_refused_when_the_defense_is_built(name, options):
    with pytest.raises(ValueError, match=r"defense\.\w+: expected a (positive )?finite number.*"):
        dm.defense(name, **options)


@pytest.mark.parametrize("wrong", [None, 3, {"name": "sign"}])
def test_what_is_no_list_of_defenses_is_refused(wrong, classifier, batch):
    with pytest.raises(TypeError, match="defenses: expected a list"):
        dm.observe(classifier, batch, defenses=wrong)


@pytest.mark.parametrize("name", ["blur", "pixelation"])
def test_inputs_that_are_not_images_are_refused(name):
    flat = dm.Batch(torch.rand(4, 64), torch.arange(4))
    with pytest.raises(dm.Refused, match=rf"{name} needs images \(channels, height, width\); these inputs have shape \(64,\)"):
        dm.observe(nn.Linear(64, 10), flat, defenses=(dm.defense(name, **EXAMPLES[name]),))


@pytest.mark.parametrize("name", ["dropout", "precode"])
def test_defenses_that_draw_in_train_mode_refuse_eval_mode(name, classifier, batch):
    with pytest.raises(dm.Refused, match=rf"{name} .* in train mode only, and this client trains in eval mode"):
        dm.observe(classifier.eval(), batch, defenses=(dm.defense(name),))


@pytest.mark.parametrize("name", ["dropout", "precode"])
def test_a_replay_on_the_truth_does_not_repeat_the_clients_draw(name, training_classifier, batch):
    exposure = dm.observe(training_classifier, batch, defenses=(dm.defense(name, **EXAMPLES[name]),))
    replayed = exposure.public.training(exposure.model, batch.inputs, batch.targets, exposure.public.loss)
    assert not torch.allclose(replayed["0.weight"], exposure.update["0.weight"], rtol=1e-3)
