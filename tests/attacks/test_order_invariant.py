import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.matching.epochs_apart import EpochsApart, SameInEveryEpoch
from dosimeter.types import Refused


def model(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Flatten(), nn.Linear(16, 24), nn.Sigmoid(), nn.Linear(24, 4)).eval()


def private(seed=0, size=4):
    rng = torch.Generator().manual_seed(seed)
    return dm.Batch(torch.rand(size, 1, 4, 4, generator=rng), torch.arange(size) % 4)


@pytest.mark.parametrize(
    "training", [dm.FedAvg(epochs=3, mini_batch=3, learning_rate=0.1), dm.FedAvg(steps=5, mini_batch=2, learning_rate=0.1)]
)
def test_the_same_guesses_in_every_epoch_are_the_training_itself(training):
    """The law: with the same samples in the same order in each epoch, the replay is FedAvg's."""
    network, batch = model().double(), private()
    inputs = batch.inputs.double()
    apart = EpochsApart(each=training, batch_size=4)
    epochs = apart.epochs()
    assert epochs == 3
    repeated = apart(network, inputs.repeat(epochs, 1, 1, 1), batch.targets.repeat(epochs), CrossEntropy(), create_graph=True)
    wanted = training(network, inputs, batch.targets, CrossEntropy())
    for name, change in wanted.items():
        torch.testing.assert_close(repeated[name].detach(), change, rtol=1e-8, atol=1e-11)


def test_each_epoch_in_the_clients_order_explains_a_shuffled_update():
    """The reference: with the orders that the client drew, the replay gives its update. The wrong order does not."""
    network, batch = model().double(), private()
    inputs, training = batch.inputs.double(), dm.FedAvg(epochs=3, mini_batch=1, learning_rate=0.5, shuffle=True)
    with torch.random.fork_rng():
        torch.manual_seed(5)
        sent = training(network, inputs, batch.targets, CrossEntropy())
        torch.manual_seed(5)
        order = torch.cat([torch.randperm(4) for _ in range(3)])
    apart = EpochsApart(each=training, batch_size=4)
    right = apart(network, inputs[order], batch.targets[order], CrossEntropy(), create_graph=True)
    wrong = training(network, inputs, batch.targets, CrossEntropy(), create_graph=True)
    for name, change in sent.items():
        torch.testing.assert_close(right[name].detach(), change, rtol=1e-8, atol=1e-11)
    assert float((wrong["1.weight"].detach() - sent["1.weight"]).norm()) > 1e-3 * float(sent["1.weight"].norm())


def test_the_prior_does_not_see_the_order():
    prior, images = SameInEveryEpoch(weight=1.0, labels=(3, 1, 3, 1)), torch.rand(4, 1, 4, 4)
    same = torch.cat([images, images[[2, 1, 0, 3]]])  # within a label
    assert float(prior(same, {})) < 1e-12
    other = torch.cat([images, images[[1, 0, 2, 3]]])  # across labels
    means = torch.stack([torch.stack([part[[0, 2]].mean(0), part[[1, 3]].mean(0)]) for part in (images, images[[1, 0, 2, 3]])])
    torch.testing.assert_close(prior(other, {}), (means - means.mean(0)).square().mean())


def test_inputs_come_back_from_shuffled_epochs():
    """Nearer than the mean image, and than the replay in the wrong order."""
    network, batch = model(5), private(5)
    exposure = dm.observe(network, batch, training=dm.FedAvg(epochs=3, mini_batch=2, learning_rate=0.5, shuffle=True), seed=5)
    options = {"labels": batch.targets[[2, 0, 3, 1]], "steps": 150, "total_variation": 0.0}
    found, replayed = (dm.reconstruct(exposure, attack, **options) for attack in ("order_invariant", "inverting_gradients"))
    assert found.inputs.shape == batch.inputs.shape
    assert sorted(found.labels.tolist()) == [0, 1, 2, 3]
    ours, wrong = (float(dm.score(one, batch)["psnr"].median()) for one in (found, replayed))
    null = float(-10 * (batch.inputs - batch.inputs.mean(0)).flatten(1).square().mean(1).log10().median())
    assert ours > max(null, wrong) + 3


def test_refusals():
    with pytest.raises(Refused, match=r"order_invariant needs one client with local epochs \(fedavg\); this one sends fedsgd"):
        dm.reconstruct(dm.observe(model(), private()), "order_invariant", labels=private().targets)
    exposure = dm.observe(model(), private(), training=dm.FedAvg(epochs=2))
    with pytest.raises(Refused, match="takes one label for each sample, not soft labels"):
        dm.reconstruct(exposure, "order_invariant", labels=torch.full((4, 4), 0.25))
