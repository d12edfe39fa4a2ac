"""The targets of a regression, exactly, where the head's gradient determines them."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from tests.labels.test_head_slopes import model_of, pictures


def numbers(seed, *shape):
    return 10 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("outputs", [4, 6])
def test_targets_behind_a_relu_are_exact_and_certified(outputs):
    for seed in (0, 1):
        batch = dm.Batch(pictures(seed), numbers(seed, 4, outputs))
        exposure = dm.observe(model_of(outputs, seed, 128), batch, loss=nn.MSELoss())
        found = dm.recover_targets(exposure)
        assert bool(found.certified.all())
        distance = torch.cdist(found.targets, batch.targets.double())
        assert sorted(distance.argmin(1).tolist()) == [0, 1, 2, 3]
        assert bool((distance.amin(1) <= found.error_bars).all())
        assert float(found.error_bars.max()) < 1e-2
        scores = dm.score(found, batch, exposure=exposure)
        assert float(scores["target_error"].max()) < 1e-5
        assert scores.details["false_certificates"] == 0
        wrong = dm.Batch(batch.inputs, batch.targets + 1)
        assert dm.score(found, wrong, exposure=exposure).details["false_certificates"] == 4


@pytest.mark.parametrize("rest", [(), (nn.Flatten(0),)])
def test_one_sample_needs_no_relu(rest):
    target = numbers(2, 1, 1).reshape((1,) if rest else (1, 1))
    exposure = dm.observe(model_of(1, 0, 64, nn.GELU, *rest), dm.Batch(pictures(2, 1), target), loss=nn.MSELoss())
    found = dm.recover_targets(exposure)
    assert found.targets.shape == target.shape
    assert torch.allclose(found.targets, target.double(), atol=float(found.error_bars[0]))
    assert bool(found.certified.all())


def test_a_sum_over_the_outputs_has_its_own_scale():
    batch = dm.Batch(pictures(1), numbers(1, 4, 6))
    found = dm.recover_targets(dm.observe(model_of(6, 0, 128), batch, loss=dm.SquaredError(over_outputs="sum")))
    assert float(torch.cdist(found.targets, batch.targets.double()).amin(1).max()) < 1e-3


def test_mixed_features_are_refused_with_the_theorem():
    """Any invertible mixing has the same gradient at the head: here is one, with other targets."""
    model, batch = model_of(6, 0, 32, nn.GELU), dm.Batch(pictures(3), numbers(3, 4, 6))
    exposure = dm.observe(model, batch, loss="squared_error")
    with pytest.raises(dm.Refused, match="any invertible mixing of 4 samples' features"):
        dm.recover_targets(exposure)
    head, features = model[3], model[:3](batch.inputs).detach()
    slopes = 2 * (head(features) - batch.targets).detach() / 24
    mixing = torch.linalg.qr(numbers(4, 4, 4)).Q
    mixing = mixing @ torch.diag(1 / (mixing.T @ torch.ones(4)))  # its inverse leaves the sum of the slopes as it is
    other, theirs = torch.linalg.inv(mixing) @ features, mixing.T @ slopes
    assert torch.allclose(theirs.T @ other, exposure.update["3.weight"], atol=1e-4)
    assert not torch.allclose(head(other) - 12 * theirs, batch.targets, atol=1)


def test_other_losses_and_classes_are_refused():
    batch = dm.Batch(pictures(0), numbers(0, 4, 6))
    with pytest.raises(dm.Refused, match="tells a side alone"):
        dm.recover_targets(dm.observe(model_of(6), batch, loss=nn.L1Loss()))
    with pytest.raises(dm.Refused, match="inverts the slopes of squared_error"):
        dm.recover_targets(dm.observe(model_of(6), batch, loss=lambda outputs, targets: ((outputs - targets) ** 4).mean()))
    with pytest.raises(dm.Refused, match=r"dm.recover_labels reads them"):
        dm.recover_targets(dm.observe(model_of(6), dm.Batch(pictures(0), torch.arange(4))))
    with pytest.raises(dm.Refused, match=r"dm.recover_targets reads them"):
        dm.recover_labels(dm.observe(model_of(6), batch, loss="squared_error"), "ilrg")


def test_features_come_back_under_any_loss():
    batch, model = dm.Batch(pictures(5), numbers(5, 4, 6)), model_of(6, 0, 128)
    for loss in (nn.L1Loss(), nn.HuberLoss(), lambda outputs, targets: ((outputs - targets) ** 4).mean()):
        exposure = dm.observe(model, batch, loss=loss)
        found = dm.recover_features(exposure, "head_slopes")
        assert bool(found.certified.all())
        scores = dm.score(found, batch, exposure=exposure)
        assert float(scores["feature_error"].max()) < 1e-5
        assert scores.details["false_certificates"] == 0


def test_an_audit_reads_targets_in_place_of_labels():
    batch = dm.Batch(pictures(6), numbers(6, 4, 6))
    audit = dm.audit(model_of(6, 0, 128), batch, loss=nn.MSELoss(), features=[], maps=[], attacks=[])
    assert {record.surface: record.verdict for record in audit.records} == {"targets": "leaked"}


@pytest.mark.parametrize(
    ("protocol", "why"),
    [
        ({"declare_batch_size": False}, "no batch size is declared"),
        ({"defenses": (dm.defense("pruning", ratio=0.1),)}, "a defense emptied some entries"),
    ],
)
def test_nothing_is_proved_where_the_scale_of_a_slope_or_single_slopes_are_open(protocol, why):
    batch = dm.Batch(pictures(1), numbers(1, 4, 6))
    found = dm.recover_targets(dm.observe(model_of(6, 0, 256), batch, loss="squared_error", **protocol))
    assert not found.certified.any()
    assert found.premises == ()
    assert why in found.message


@pytest.mark.parametrize("closing", [nn.Sigmoid, nn.Tanh, nn.Softplus])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_targets_are_exact_through_a_bounded_output_and_under_a_sum(closing, reduction):
    batch = dm.Batch(pictures(5), torch.rand(4, 6, generator=torch.Generator().manual_seed(6)))
    exposure = dm.observe(model_of(6, 5, 128, nn.ReLU, closing()).eval(), batch, loss=nn.MSELoss(reduction=reduction))
    found = dm.recover_targets(exposure)
    distance = torch.cdist(found.targets, batch.targets.double())
    assert bool(found.certified.all())
    assert sorted(distance.argmin(1).tolist()) == [0, 1, 2, 3]
    assert bool((distance.amin(1) <= found.error_bars).all())
    assert float(found.error_bars.max()) < 5e-2


def test_a_softmax_behind_the_head_mixes_the_outputs():
    batch = dm.Batch(pictures(5), torch.rand(4, 6, generator=torch.Generator().manual_seed(6)))
    exposure = dm.observe(model_of(6, 5, 128, nn.ReLU, nn.Softmax(1)).eval(), batch, loss=nn.MSELoss())
    with pytest.raises(dm.Refused, match="softmax follows the head"):
        dm.recover_targets(exposure)
    assert bool(dm.recover_features(exposure, "head_slopes").certified.all())


@pytest.mark.parametrize(
    ("loss", "spread"),
    [(nn.HuberLoss(delta=3.0), 0.5), (nn.HuberLoss(reduction="sum"), 0.2), (nn.SmoothL1Loss(beta=2.0), 0.5), (nn.PoissonNLLLoss(), 1.0)],
)
def test_losses_whose_slope_grows_with_the_distance_give_their_targets(loss, spread):
    batch = dm.Batch(pictures(1), (spread * numbers(1, 4, 6) / 10).abs().round(decimals=1))
    exposure = dm.observe(model_of(6, 1, 128), batch, loss=loss)
    found = dm.recover_targets(exposure)
    distance = torch.cdist(found.targets, batch.targets.double())
    assert bool(found.certified.all())
    assert sorted(distance.argmin(1).tolist()) == [0, 1, 2, 3]
    assert bool((distance.amin(1) <= found.error_bars).all())
    assert float(found.error_bars.max()) < 2e-2
    assert dm.score(found, batch, exposure=exposure).details["false_certificates"] == 0


def test_a_slope_at_its_limit_bounds_the_target_and_proves_nothing():
    targets = numbers(1, 4, 6) / 100
    targets[2, 3] = 50.0
    batch = dm.Batch(pictures(1), targets)
    found = dm.recover_targets(dm.observe(model_of(6, 1, 128), batch, loss=nn.HuberLoss(delta=2.0)))
    assert found.certified.sum() == 3
    assert "1 of 4 samples" in found.message
    assert torch.cdist(found.targets[~found.certified], batch.targets[:2].double()).min() > 1


def test_targets_that_are_spread_over_outputs_are_not_read():
    """PyTorch's HuberLoss meets outputs (B, 1) and targets (B,) as a (B, B) table."""
    with pytest.raises(ValueError, match="targets"), pytest.warns(UserWarning, match="size"):
        dm.recover_targets(dm.observe(model_of(1, 1, 128), dm.Batch(pictures(1), numbers(1, 4)), loss=nn.HuberLoss()))
