import dataclasses
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.counting.regression import _ridge, regress_counts
from dosimeter.engines.counting.simulation import Simulator
from dosimeter.types import Refused

CLASSES, SIZE = 5, 12
TRAININGS = {
    "sgd": dm.FedAvg(learning_rate=0.05, epochs=5, mini_batch=4, shuffle=True),
    "momentum": dm.FedAvg(learning_rate=0.01, momentum=0.9, epochs=5, mini_batch=4, shuffle=True),
    "adam": dm.FedAvg(learning_rate=0.002, epochs=5, mini_batch=4, shuffle=True, optimizer="adam"),
    "gradient": dm.FedSGD(),
}


def samples(labels, seed):
    """Points around a centre for each class, which overlap."""
    rng = torch.Generator().manual_seed(seed)
    centres = torch.randn(CLASSES, 6, generator=torch.Generator().manual_seed(99))
    return dm.Batch(centres[labels] + 0.7 * torch.randn(len(labels), 6, generator=rng), labels)


def model(seed=0, outputs=CLASSES):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, outputs)).eval()


def trained():
    """A model that has begun to learn: it classifies most samples correctly, and few with certainty."""
    one, lessons = model(), samples(torch.arange(500) % CLASSES, 50)
    update = dm.FedAvg(learning_rate=0.1, epochs=2, mini_batch=25)(one, lessons.inputs, lessons.targets, dm.CrossEntropy())
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            parameter.sub_(0.1 * 40 * update[name])
    return one


def exposure_of(network, training, seed, labels=None, **options):
    rng = torch.Generator().manual_seed(1000 + seed)
    if labels is None:
        labels = torch.multinomial(torch._sample_dirichlet(torch.full((CLASSES,), 0.5), rng), SIZE, replacement=True, generator=rng)
    options = {"auxiliary": samples(torch.arange(200) % CLASSES, 1)} | options
    options |= {"normalization": dm.Normalization(mean=(0.5,), std=(0.05,))}  # inputs reach from −10 to 10
    return dm.observe(network, samples(labels, 2000 + seed), training=training, seed=seed, **options), torch.bincount(
        labels, minlength=CLASSES
    )


def right(counts, wanted):
    return float(torch.minimum(counts, wanted).sum() / wanted.sum())


@pytest.mark.parametrize("name", TRAININGS)
def test_counts_after_local_epochs_with_any_optimiser(name):
    """Most labels are right, where half of them would be by taking all classes as equally frequent."""
    shares = []
    for seed in range(2):
        exposure, wanted = exposure_of(model(seed), TRAININGS[name], seed)
        found = dm.recover_labels(exposure, "rlu", seed=seed, simulations=48)
        assert int(found.counts.sum()) == SIZE
        assert not found.certified
        shares.append(right(found.counts, wanted))
    assert sum(shares) / len(shares) >= 0.9


def test_a_trained_model_beats_what_reads_one_gradient():
    ours, theirs = [], []
    for seed in range(3):
        exposure, wanted = exposure_of(trained(), TRAININGS["sgd"], seed)
        ours.append(right(dm.recover_labels(exposure, "rlu", seed=seed).counts, wanted))
        theirs.append(right(dm.recover_labels(exposure, "ilrg", seed=seed).counts, wanted))
    assert sum(ours) > sum(theirs) + 0.2


def test_the_regression_is_exact_on_linear_statistics():
    rng = torch.Generator().manual_seed(0)
    counts = torch.randint(9, (60, CLASSES), generator=rng)
    mix = torch.eye(CLASSES).double() + 0.1 * torch.randn(CLASSES, CLASSES, generator=rng, dtype=torch.float64)
    shown = torch.stack([counts.double() @ mix, 3 - 2 * counts.double()], 1)  # (60, 2, C)
    found, errors = regress_counts(shown[1:], counts[1:], shown[0])
    torch.testing.assert_close(found, counts[0].double(), rtol=0, atol=1e-3)
    assert float(errors.max()) < 1e-3


def test_the_error_is_that_of_leaving_a_client_out():
    """The reference: the same ridge regression, fitted anew without each client."""
    rng = torch.Generator().manual_seed(1)
    inputs = torch.randn(30, 4, generator=rng, dtype=torch.float64)
    inputs = inputs - inputs.mean(0)
    wanted = inputs @ torch.randn(4, 2, generator=rng, dtype=torch.float64) + torch.randn(30, 2, generator=rng, dtype=torch.float64)
    wanted = wanted - wanted.mean(0)
    _, errors = _ridge(inputs, wanted, inputs[0])
    missed = []
    for out in range(30):
        kept = torch.arange(30) != out
        x, y = inputs[kept] - inputs[kept].mean(0), wanted[kept] - wanted[kept].mean(0)
        fits = [torch.linalg.solve(x.T @ x + p * torch.eye(4).double(), x.T @ y) for p in (0.1, 1.0)]
        missed.append(torch.stack([wanted[out] - wanted[kept].mean(0) - (inputs[out] - inputs[kept].mean(0)) @ fit for fit in fits]))
    by_hand = torch.stack(missed).square().mean(0).sqrt()
    assert float((errors - by_hand).abs().min(0).values.max()) < 0.05 * float(errors.max())


def test_simulated_clients_have_the_counts_that_were_drawn():
    exposure, _ = exposure_of(model(), TRAININGS["sgd"], 0)
    simulator = Simulator(exposure, torch.Generator().manual_seed(0), probes=200)
    counts = simulator.draw_counts(7)
    assert (counts.sum(1) == SIZE).all()
    for one in counts:
        assert torch.equal(torch.bincount(simulator.labels[simulator._draw_places(one)], minlength=CLASSES), one)
    centred = simulator.draw_counts(200, torch.tensor([1.0, 0, 0, 0, 0]), certainty=100.0)
    assert float(centred.double().mean(0)[0]) > 0.9 * SIZE


def test_fewer_probes_take_fewer_passes_and_still_count():
    few = dm.label_recovery("rlu", probes=40, simulations=32)
    exposure, wanted = exposure_of(model(), TRAININGS["gradient"], 0)
    assert few.forwards(exposure) == (65 * 40, 64 * 3 * SIZE)
    assert dm.label_recovery("rlu", rounds=1, simulations=32).forwards(exposure) == (33 * 200, 32 * 3 * SIZE)
    local, _ = exposure_of(model(), TRAININGS["sgd"], 0)
    assert few.forwards(local) == (65 * 40, 64 * 3 * 5 * SIZE)  # five epochs
    assert few.forwards(dataclasses.replace(exposure, auxiliary=None)) == (0, 0)
    assert right(dm.recover_labels(exposure, few).counts, wanted) >= 0.9


def test_a_class_without_auxiliary_samples_counts_as_absent():
    auxiliary = samples(torch.arange(200) % (CLASSES - 1), 1)
    exposure, _ = exposure_of(model(), TRAININGS["sgd"], 0, auxiliary=auxiliary)
    found = dm.recover_labels(exposure, "rlu", simulations=16, rounds=1)
    assert int(found.counts[-1]) == 0
    assert found.message == "no auxiliary sample of class 4, which counts as absent"


def test_yes_or_no_by_one_logit():
    labels = torch.tensor([0] * 9 + [1] * 3)
    auxiliary = samples(torch.arange(200) % 2, 1)
    exposure, _ = exposure_of(
        model(outputs=1), dm.FedAvg(epochs=3, learning_rate=0.1), 0, labels, auxiliary=auxiliary, loss="binary_cross_entropy"
    )
    assert (dm.recover_labels(exposure, "rlu").counts - torch.tensor([9, 3])).abs().max() <= 1


def test_refusals():
    with pytest.raises(Refused, match="rlu needs auxiliary data"):
        dm.recover_labels(exposure_of(model(), TRAININGS["sgd"], 0, auxiliary=None)[0], "rlu")
    alike = samples(torch.zeros(20, dtype=torch.int64), 1)
    with pytest.raises(Refused, match="rlu needs auxiliary samples of at least two classes"):
        dm.recover_labels(exposure_of(model(), TRAININGS["sgd"], 0, auxiliary=alike)[0], "rlu")
    with pytest.raises(Refused, match="rlu needs the batch size"):
        dm.recover_labels(exposure_of(model(), dm.FedAvg(steps=2), 0, declare_batch_size=False)[0], "rlu")


def test_an_update_under_which_the_model_has_no_finite_logits_is_refused():
    exposure = exposure_of(model(), TRAININGS["gradient"], 0)[0]
    huge = {name: torch.full_like(change, 1e30) for name, change in exposure.update.items()}
    with pytest.raises(Refused, match="with the client's update has logits that are no finite numbers"):
        dm.recover_labels(dataclasses.replace(exposure, update=huge), "rlu")


def test_many_classes_take_no_square_of_them():
    """The slopes of 20,000 classes would take 6.4 GB."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    held = next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmSize")) * 1024
    rng = torch.Generator().manual_seed(0)
    statistics, counts = torch.randn(8, 2, 20_000, generator=rng, dtype=torch.float64), torch.randint(0, 3, (8, 20_000), generator=rng)
    resource.setrlimit(resource.RLIMIT_AS, (held + 3 * 2**30, before[1]))
    try:
        found, errors = regress_counts(statistics, counts, statistics[0])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
    assert found.shape == errors.shape == (20_000,)
    assert bool(found.isfinite().all())
