"""Fishing: round by round fewer samples of a class pass, down to one, which is then matched by itself."""

import itertools

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.fishing import Fishing


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 80), nn.Sigmoid(), nn.Linear(80, 10)).eval()


@pytest.fixture
def crowd(digits) -> dm.Batch:
    """Many samples of one class, as the paper's users have them."""
    images, labels = digits
    own = (labels == 3).nonzero().flatten()[:24]
    return dm.Batch(images[own].clone(), labels[own].clone())


def play(attack: Fishing, batch: dm.Batch, rounds: int = 12) -> tuple[Fishing, dm.Exposure, list[int]]:
    """Rounds until one sample passes: the last attack, what it saw, and how many passed in each round."""
    model, counts = network(), []
    for _ in range(rounds):
        exposure = dm.observe(attack.tamper(model), batch)
        counts.append(round(attack.passed(exposure)))
        if counts[-1] == 1:
            return attack, exposure, counts
        attack = attack.next_round(exposure)
    raise AssertionError(counts)


def test_every_round_passes_fewer_and_the_last_is_the_sample_with_the_smallest_feature(crowd):
    attack, exposure, counts = play(Fishing(target=3), crowd)
    assert counts[0] == 24
    assert all(later < earlier for earlier, later in itertools.pairwise(counts))
    features = network()[:3](crowd.inputs).detach()
    assert attack.feature == int(features.mean(0).argmax())
    lone = int(features[:, attack.feature].argmin())
    calibrated = attack.calibrate(exposure)
    one = dm.Batch(crowd.inputs[lone : lone + 1], crowd.targets[lone : lone + 1])
    expected = dm.FedSGD()(calibrated.model, one.inputs, one.targets, dm.CrossEntropy())
    for name, change in calibrated.update.items():
        torch.testing.assert_close(change, expected[name], rtol=1e-3, atol=1e-4 * float(expected[name].abs().max()))


def test_the_papers_case_one_sample_of_a_crowd_is_reconstructed(crowd):
    attack, exposure, _ = play(Fishing(target=3, steps=400), crowd)
    found = dm.reconstruct(exposure, attack)
    assert len(found.inputs) == 1
    error = (found.inputs - crowd.inputs).flatten(1).square().mean(1).min()
    assert float(error) < 1e-3  # 30 dB
    plain = dm.reconstruct(dm.observe(network(), crowd), "inverting_gradients", labels=crowd.targets, steps=400)
    assert float((plain.inputs[:, None] - crowd.inputs).flatten(2).square().mean(2).min()) > 10 * float(error)


def test_class_fishing_finds_the_only_sample_of_its_class(digits):
    images, labels = digits
    others = (labels != 3).nonzero().flatten()[:30]
    chosen = torch.cat([others, (labels == 3).nonzero().flatten()[:1]])
    batch = dm.Batch(images[chosen].clone(), labels[chosen].clone())
    attack = Fishing(target=3, steps=400)
    found = dm.reconstruct(dm.observe(attack.tamper(network()), batch), attack)
    assert float((found.inputs - batch.inputs[-1:]).square().mean()) < 1e-3


def test_a_crowd_is_left_to_the_next_round_and_other_classes_are_noticed(crowd, digits):
    attack = Fishing(target=3)
    exposure = dm.observe(attack.tamper(network()), crowd)
    assert "24 of 24 samples passed: send `next_round`" in dm.reconstruct(exposure, attack).message
    images, labels = digits
    mixed = dm.Batch(torch.cat([crowd.inputs, images[labels == 5][:4]]), torch.cat([crowd.targets, labels[labels == 5][:4]]))
    second = attack.next_round(exposure)
    found = dm.reconstruct(dm.observe(second.tamper(network()), mixed), second)
    assert len(found.inputs) == 0
    assert "samples of other classes" in found.message


def test_refusals(classifier, batch):
    with pytest.raises(dm.Refused, match="bears its head"):
        dm.reconstruct(dm.observe(classifier, batch), Fishing(target=3))
    with pytest.raises(ValueError, match=r"attack\.target: expected a class id in 0\.\.9, got 12"):
        Fishing(target=12, input_shape=(1, 8, 8)).tamper(classifier)
    with pytest.raises(ValueError, match=r"attack\.feature: expected with a cutoff"):
        Fishing(target=1, cutoff=0.5, input_shape=(1, 8, 8)).tamper(classifier)
    moved = dm.observe(Fishing(target=3).tamper(network()), batch, training=dm.FedAvg(steps=2))
    with pytest.raises(dm.Refused, match="local steps move the head"):
        dm.reconstruct(moved, Fishing(target=3))
