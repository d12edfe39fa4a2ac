"""Model inconsistency: behind secure aggregation of many clients, one client's update stands alone."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.model_inconsistency import ModelInconsistency
from dosimeter.models.loading import load_model

CLIENTS = 12


@pytest.fixture
def clients(digits) -> list[dm.Batch]:
    """The first client has one sample, the others five."""
    images, labels = digits
    return [dm.Batch(images[i : i + n].clone(), labels[i : i + n].clone()) for i, n in [(0, 1), *((10 * j, 5) for j in range(1, CLIENTS))]]


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 10)).eval()


def test_the_aggregate_is_the_targets_own_update(clients):
    model, attack = network(), ModelInconsistency(target=0, input_shape=(1, 8, 8))
    exposure = dm.observe(attack.tamper(model), clients)
    alone = attack.isolate(exposure)
    own = dm.FedSGD()(model, clients[0].inputs, clients[0].targets, dm.CrossEntropy())
    assert set(alone.update) == {f"body.{name}" for name in own} - {"body.5.bias"}
    for name, change in alone.update.items():
        torch.testing.assert_close(change, own[name.removeprefix("body.")], rtol=1e-5, atol=1e-7)
    honest = dm.observe(model, clients).update["1.weight"] * exposure.public.batch_size
    assert (honest - own["1.weight"]).norm() > own["1.weight"].norm()


def test_any_client_can_be_the_target(clients):
    attack = ModelInconsistency(target=4, input_shape=(1, 8, 8))
    alone = attack.isolate(dm.observe(attack.tamper(network()), clients))
    own = dm.FedSGD()(network(), clients[4].inputs, clients[4].targets, dm.CrossEntropy())
    torch.testing.assert_close(alone.update["body.1.weight"], own["1.weight"], rtol=1e-4, atol=1e-7)


def test_a_sample_is_reconstructed_from_the_aggregate_of_many_clients(clients):
    attack = ModelInconsistency(target=0, input_shape=(1, 8, 8), steps=400)
    found = dm.reconstruct(dm.observe(attack.tamper(network()), clients), attack)
    assert found.labels.tolist() == clients[0].targets.tolist()
    assert float((found.inputs - clients[0].inputs).square().mean()) < 2e-3  # 27 dB


@pytest.mark.parametrize("kind", ["resnet20", "vgg11", "lenet5", "mlp6"])
def test_dead_models_send_nothing_but_the_last_bias(kind):
    model = load_model(kind, {}, None, 3).eval()
    rigged = ModelInconsistency(input_shape=(3, 32, 32)).tamper(model)
    batch = dm.Batch(torch.rand(3, 3, 32, 32), torch.arange(3))
    update = dm.FedSGD()(rigged.of_client(1), batch.inputs, batch.targets, dm.CrossEntropy())
    assert {name for name, change in update.items() if change.any()} == {list(update)[-1]}
    assert torch.equal(rigged.of_client(0)(batch.inputs), model(batch.inputs))


def test_inspect_sees_nothing_at_the_target_and_cannot_tell_a_dead_model_from_an_empty_head(clients):
    """The measured answer: no check flags either model. At a dead one the checks of the last layer say that they cannot look."""
    rigged = ModelInconsistency(input_shape=(1, 8, 8)).tamper(network())
    crowd = dm.Batch(torch.cat([one.inputs for one in clients]), torch.cat([one.targets for one in clients]))
    assert not dm.inspect(rigged.of_client(0), crowd).suspicious
    dead = dm.inspect(rigged.of_client(1), crowd)
    assert "no logit depends on the input" in dead.left_out["constant_output"]
    compared = dm.inspect(rigged.of_client(1).body, crowd, network())
    assert {one.check for one in compared.findings if one.suspicious} >= {"previous_round"}


def test_refusals(classifier, clients):
    attack = ModelInconsistency(input_shape=(1, 8, 8))
    with pytest.raises(dm.Refused, match="models of their own"):
        dm.reconstruct(dm.observe(network(), clients), attack)
    with pytest.raises(dm.Refused, match="this client is alone"):
        dm.reconstruct(dm.observe(attack.tamper(network()), clients[0]), attack)
    with pytest.raises(dm.Refused, match="kills the features by ReLUs"):
        attack.tamper(nn.Sequential(nn.Flatten(), nn.Linear(64, 20), nn.Sigmoid(), nn.Linear(20, 10)))
    with pytest.raises(dm.Refused, match=r"expected a client in 0\.\.11, got 40"):
        dm.reconstruct(
            dm.observe(ModelInconsistency(target=40, input_shape=(1, 8, 8)).tamper(network()), clients), ModelInconsistency(target=40)
        )
