"""Soft labels from one scalar."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy, Focal
from dosimeter.client.observe import observe
from dosimeter.client.training import FedAvg
from dosimeter.runs.server import recover_labels
from dosimeter.surfaces.labels import Labels
from dosimeter.types import Batch, Outcome, Refused


def soft_label(family: str, classes: int, seed: int) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randperm(classes, generator=rng)[:2]
    part = float(torch.rand((), generator=rng))
    label = torch.zeros(1, classes)
    if family == "smoothing":
        label += 0.5 * part / classes
        label[0, first] += 1 - 0.5 * part
    else:
        label[0, first] = 1 if family == "one_hot" else part
        label[0, second] += 0 if family == "one_hot" else 1 - part
    return label


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("classes", [10, 100])
@pytest.mark.parametrize("family", ["smoothing", "mixup", "one_hot"])
def test_the_label_and_the_feature_come_back_without_any_bias(expose, inputs, family, classes, seed):
    label = soft_label(family, classes, seed)
    exposure = expose(label, classes=classes, bias=False, seed=seed)
    estimate = recover_labels(exposure, "soft_scalar", family=family)
    assert float((estimate.soft - label).abs().sum()) < 1e-4
    assert estimate.certified
    feature = exposure.model[:2](inputs(1, seed)).detach()
    assert torch.allclose(estimate.details["features"].float(), feature, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("activation", [nn.Tanh, nn.SiLU])
def test_signs_of_features_and_temperature_are_allowed_for(expose, activation):
    label = soft_label("smoothing", 10, 3)
    estimate = recover_labels(expose(label, activation=activation, loss=CrossEntropy(temperature=0.7)), "soft_scalar")
    assert float((estimate.soft - label).abs().sum()) < 1e-4


def test_a_smoothing_loss_is_seen_as_the_label_that_it_aims_at(expose):
    estimate = recover_labels(expose([4], loss=CrossEntropy(smoothing=0.3)), "soft_scalar")
    assert torch.allclose(estimate.soft, CrossEntropy(smoothing=0.3).smooth_targets(torch.tensor([4]), 10, torch.float32), atol=1e-4)
    assert estimate.labels.tolist() == [4]


def test_the_published_search_agrees_with_the_grid(expose):
    label = soft_label("smoothing", 10, 1)
    exposure = expose(label)
    grid = recover_labels(exposure, "soft_scalar")
    published = recover_labels(exposure, "soft_scalar", search="published")
    assert float((published.soft - label).abs().sum()) < 1e-2
    assert float(published.details["scalar"]) == pytest.approx(float(grid.details["scalar"]), rel=1e-2)


@pytest.mark.parametrize(
    "options", [{"optimiser": "swarm", "particles": 200, "flights": 30}, {"optimiser": "lbfgs"}, {"optimiser": "adam"}]
)
def test_each_optimiser_alone_finds_the_scalar_of_an_untrained_head(expose, options):
    label = soft_label("smoothing", 10, 1)
    found = recover_labels(expose(label), "soft_scalar", search="published", **options)
    assert float((found.soft - label).abs().sum()) < 2e-2


def test_the_losses_of_the_appendix_find_what_the_variance_finds(expose):
    smoothed, mixed = soft_label("smoothing", 10, 1), soft_label("mixup", 10, 2)
    settings = {"search": "published", "optimiser": "swarm"}
    squares = recover_labels(expose(mixed), "soft_scalar", family="mixup", target="zeros", **settings)
    assert float((squares.soft - mixed).abs().sum()) < 2e-2
    kept = recover_labels(expose(mixed), "soft_scalar", family="mixup", target="non_negative", **settings)
    assert float(kept.soft.min()) > -1e-3  # all that this loss asks for
    flat = recover_labels(expose(smoothed), "soft_scalar", target="zeros", **settings)
    assert float((flat.soft - smoothed).abs().sum()) > 1e-3  # a smoothed label has no zeros


def test_options_of_the_published_search_are_refused_beside_the_grid():
    with pytest.raises(ValueError, match="optimiser: expected only beside search = 'published'"):
        dm.label_recovery("soft_scalar", optimiser="swarm")


def test_the_scalar_is_judged_by_the_private_sample_in_the_papers_unit(expose, inputs):
    label = soft_label("smoothing", 10, 1)
    exposure, truth = expose(label), Batch(inputs(1, 0), label)
    found = recover_labels(exposure, "soft_scalar", search="published", optimiser="swarm")
    row, s = int(found.details["row"]), 1 / float(found.details["scalar"])
    error = (exposure.model(truth.inputs).softmax(1) - label)[0, row].detach()
    assert Labels().details(found, exposure, truth)["scalar_error"] == pytest.approx(abs(4 / s - 4 / float(error)), abs=1e-4)
    assert "scalar_error" not in Labels().details(recover_labels(exposure, "soft_scalar"), exposure, truth)


def test_a_head_that_predicts_the_same_for_all_leaves_a_range_of_scalars_and_says_so(inputs):
    model = nn.Sequential(nn.Linear(32, 8, bias=False), nn.ReLU(), nn.Linear(8, 10, bias=False))
    nn.init.zeros_(model[2].weight)
    label = soft_label("smoothing", 10, 0)
    estimate = recover_labels(observe(model.eval(), Batch(inputs(1), label)), "soft_scalar")
    assert estimate.outcome is Outcome.AMBIGUOUS
    assert not estimate.certified


@pytest.mark.parametrize("family", ["smoothing", "mixup"])
def test_what_a_sure_head_hides_is_said_and_the_bias_tells_it(expose, family):
    hits = []
    for seed in range(40):
        label = soft_label(family, 10, seed)
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
        with torch.no_grad():
            model[2].weight.mul_(30)
        exposure = expose(label, model=model, seed=seed)
        alone = recover_labels(exposure, "soft_scalar", family=family, use_bias=False)
        hits.append(float((alone.soft - label).abs().sum()) < 1e-3)
        assert hits[-1] or alone.outcome is Outcome.AMBIGUOUS
        told = recover_labels(exposure, "soft_scalar", family=family)
        assert float((told.soft - label).abs().sum()) < 1e-5
        assert told.certified
    assert sum(hits) >= 32


def test_a_label_of_another_family_is_read_off_the_bias_but_not_certified(expose):
    label = torch.tensor([[0.5, 0.3, 0.2, 0, 0, 0, 0, 0, 0, 0]])
    estimate = recover_labels(expose(label), "soft_scalar")
    assert float((estimate.soft - label).abs().sum()) < 1e-5
    assert estimate.outcome is Outcome.PARTIAL
    clipped = expose(soft_label("smoothing", 10, 5))
    halved = replace(clipped, update={name: change / 2 for name, change in clipped.update.items()})
    assert not recover_labels(halved, "soft_scalar").certified


def test_a_bias_gradient_that_disagrees_with_the_rows_is_not_believed(expose):
    label = soft_label("smoothing", 10, 2)
    exposure = expose(label)
    update = exposure.update | {"2.bias": exposure.update["2.bias"].roll(1)}
    estimate = recover_labels(replace(exposure, update=update), "soft_scalar")
    assert float((estimate.soft - label).abs().sum()) < 1e-4


def test_several_local_steps_make_the_label_a_guess(inputs):
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10, bias=False)).eval()
    batch = Batch(inputs(1), torch.tensor([9]))
    steps = recover_labels(observe(model, batch, training=FedAvg(steps=5, learning_rate=0.1)), "soft_scalar")
    assert steps.outcome is Outcome.PARTIAL
    assert "local steps" in steps.message
    assert not steps.certified
    one = recover_labels(observe(model, batch, training=FedAvg(steps=1, learning_rate=0.1)), "soft_scalar")
    assert (one.outcome, one.labels.tolist()) == (Outcome.COMPLETED, [9])


def test_a_mixed_label_is_said_not_to_be_one_hot(expose):
    label = torch.zeros(1, 10).index_copy(1, torch.tensor([2, 7]), torch.tensor([[0.6, 0.4]]))
    estimate = recover_labels(expose(label, bias=False), "soft_scalar", family="one_hot")
    assert estimate.outcome is Outcome.PARTIAL
    assert estimate.message.startswith("no one-hot label fits: 2 rows")
    assert estimate.labels.tolist() == [2]


def test_a_gradient_of_zero_tells_no_label(expose):
    exposure = expose([3])
    silent = replace(exposure, update={name: torch.zeros_like(change) for name, change in exposure.update.items()})
    estimate = recover_labels(silent, "soft_scalar")
    assert estimate.outcome is Outcome.SINGULAR
    assert len(estimate.labels) == 1


@pytest.mark.parametrize(
    "defense",
    [
        dm.defense("clipping", max_norm=0.1),
        dm.defense("pruning", ratio=0.5),
        dm.defense("gaussian_noise", std=1e-9),
        dm.defense("dpsgd", max_norm=0.5, noise_multiplier=0.0),
    ],
    ids=lambda defense: defense.name,
)
@pytest.mark.parametrize("bias", [True, False])
def test_nothing_is_certified_behind_a_defense_that_changes_values(inputs, defense, bias):
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10, bias=bias)).eval()
    if bias:  # a head that predicts all alike takes a clipped label for a smoothed one
        nn.init.zeros_(model[2].weight)
        nn.init.zeros_(model[2].bias)
    exposure = observe(model, Batch(inputs(1), torch.tensor([6])), defenses=[defense])
    estimate = recover_labels(exposure, "soft_scalar")
    assert not estimate.certified
    assert estimate.outcome is Outcome.PARTIAL
    assert f"{defense.name} changes the gradient's values" in estimate.message
    features = dm.recover_features(exposure, "scalar")
    assert not features.certified.any()
    assert defense.name in features.message


def test_defenses_that_leave_the_values_leave_the_certificate(expose, inputs):
    exposure = expose([6], bias=True)
    withheld = observe(exposure.model, Batch(inputs(1), torch.tensor([6])), defenses=[dm.defense("bias_withheld")])
    assert recover_labels(withheld, "soft_scalar").certified


def test_an_audit_behind_clipping_proves_no_label(inputs):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10, bias=False)).eval()
    batch = Batch(inputs(1), torch.tensor([6]))
    report = dm.audit(
        model, batch, defenses=[dm.defense("clipping", max_norm=0.1)], labels=["soft_scalar"], features=[], maps=[], attacks=[]
    )
    labels = next(verdict for verdict in report.verdicts if verdict.surface == "labels")
    assert "proved" not in labels.reason


def test_a_bias_gradient_that_was_pruned_to_zero_is_passed_over(expose):
    exposure = expose(soft_label("smoothing", 10, 2))
    update = exposure.update | {"2.bias": torch.zeros(10)}
    estimate = recover_labels(replace(exposure, update=update), "soft_scalar")
    alone = recover_labels(exposure, "soft_scalar", use_bias=False)
    assert torch.equal(estimate.soft, alone.soft)
    assert torch.isfinite(dm.recover_features(replace(exposure, update=update), "scalar").features).all()


def test_three_classes_certify_no_mixed_label_in_either_precision():
    for seed in range(12):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 12), nn.Tanh(), nn.Linear(12, 3, bias=False)).eval()
        sample, label = torch.rand(1, 16), torch.tensor([[0.6, 0.4, 0.0]])[:, torch.randperm(3)]
        said = []
        for kind in (torch.float32, torch.float64):
            estimate = recover_labels(observe(model.to(kind), Batch(sample.to(kind), label.to(kind))), "soft_scalar", family="mixup")
            assert not estimate.certified
            said.append(estimate.outcome)
        assert said[0] is said[1]


@pytest.mark.parametrize("classes", [10, 100])
def test_a_double_precision_search_ends_at_double_precision(expose, inputs, classes):
    label = soft_label("mixup", classes, 4).double()
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, classes, bias=False)).double().eval()
    estimate = recover_labels(observe(model, Batch(inputs(1).double(), label)), "soft_scalar", family="mixup")
    assert estimate.certified
    assert float((estimate.soft - label).abs().sum()) <= float(estimate.details["error_bar"]) < 1e-12


@pytest.mark.parametrize(("true", "told"), [("smoothing", "mixup"), ("mixup", "smoothing"), ("smoothing", "one_hot"), ("mixup", "one_hot")])
@pytest.mark.parametrize("gain", [1, 5])
def test_a_label_of_another_family_is_not_certified_without_the_bias(true, told, gain):
    """A gain of 5 makes heads that are sure: of their gradients two rows alone stand out of the noise."""
    for classes in (3, 4, 5, 6):
        for seed in range(20):
            label = soft_label(true, classes, seed)
            torch.manual_seed(1400 + seed)
            model = nn.Sequential(nn.Linear(48, 40), nn.Tanh(), nn.Linear(40, 24), nn.Tanh(), nn.Linear(24, classes)).eval()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(gain)
            exposure = observe(model, Batch(torch.rand(1, 48, generator=torch.Generator().manual_seed(seed)), label))
            estimate = recover_labels(exposure, "soft_scalar", family=told, use_bias=False)
            assert not estimate.certified or float((estimate.soft - label).abs().sum()) < 1e-3


def test_half_precision_is_within_its_error_bar():
    """What bfloat16 rounds in logits, probabilities and gradient is in the bar, whatever the bias tells of the scalar."""
    for seed in range(60):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(16, 24), nn.Tanh(), nn.Linear(24, 4)).eval()
        with torch.no_grad():
            model[2].weight.mul_(6)
        label = soft_label("one_hot", 4, seed).bfloat16()
        exposure = observe(model.bfloat16(), Batch(torch.rand(1, 16).bfloat16(), label))
        estimate = recover_labels(exposure, "soft_scalar", family="one_hot")
        error = float((estimate.scores - label[0].double()).abs().sum())
        assert error <= float(estimate.details["error_bar"])
        assert not estimate.certified or error < 1e-3


def test_an_update_sent_in_half_precision_has_that_precisions_bar(expose):
    exposure = expose(soft_label("smoothing", 10, 1))
    sent = dm.receive(
        exposure.model, {name: change.bfloat16() for name, change in exposure.update.items()}, input_shape=(32,), batch_size=1
    )
    estimate = recover_labels(sent, "soft_scalar")
    assert float((estimate.scores - soft_label("smoothing", 10, 1)[0]).abs().sum()) <= float(estimate.details["error_bar"])
    assert float(estimate.details["error_bar"]) > 1e-3


def test_two_samples_or_another_loss_are_refused(expose):
    with pytest.raises(Refused, match="batch of one: this batch has 2"):
        recover_labels(expose([1, 2]), "soft_scalar")
    with pytest.raises(Refused, match="trains with focal"):
        recover_labels(expose([1], loss=Focal()), "soft_scalar")


def test_undeclared_local_steps_are_noticed_by_the_rank(expose):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 10)).eval()
    batch = Batch(torch.rand(1, 32, generator=torch.Generator().manual_seed(1)), torch.tensor([4]))
    one, several = (observe(model, batch, training=training) for training in (None, FedAvg(steps=3, learning_rate=0.01)))
    told = replace(several, public=one.public)
    assert recover_labels(one, "soft_scalar").certified
    found = recover_labels(told, "soft_scalar")
    assert not found.certified
    assert "rank one" in found.message


def test_the_premises_stand_with_the_certificate(expose):
    found = recover_labels(expose([4]), "soft_scalar")
    assert found.certified
    assert "the batch size is 1, as declared" in found.premises
