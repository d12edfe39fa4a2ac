"""LOKI: an aggregate of many clients shows every client's samples apart, after local steps too."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.attacks.loki import Loki
from dosimeter.models.loading import load_model

SHAPE = (3, 16, 16)
CLIENTS = 5


def pictures(count: int, seed: int) -> dm.Batch:
    """Smooth random pictures on 8-bit levels, of many brightnesses."""
    rng = torch.Generator().manual_seed(seed)
    smooth = nn.functional.interpolate(torch.rand(count, 3, 5, 5, generator=rng), (16, 16), mode="bilinear")
    inputs = 0.6 * smooth + 0.4 * torch.rand(count, 1, 1, 1, generator=rng)
    return dm.Batch((inputs * 255).round() / 255, torch.randint(10, (count,), generator=rng))


@pytest.fixture
def model() -> nn.Module:
    return load_model("small_cnn", {"size": 16, "width": 4}, None, 3)


@pytest.fixture
def clients() -> list[dm.Batch]:
    return [pictures(size, 60 + size) for size in (16, 9, 1, 12, 14)]


def attack_for(count: int, **options) -> Loki:
    return Loki(clients=count, input_shape=SHAPE, **{"bins": 96, **options})


def right(found: dm.Reconstruction, batch: dm.Batch) -> int:
    """How many claims are samples of this very client; all must be."""
    if not len(found.inputs):
        return 0
    error, places = (torch.cdist(found.inputs.double().flatten(1), batch.inputs.double().flatten(1)) / 768**0.5).min(1)
    assert float(error.max()) < 1e-3
    assert len(places.unique()) == len(places)
    return len(places)


def alone_in_bins(attack: Loki, model: nn.Module, batch: dm.Batch) -> int:
    """Counted from the private samples: those whose row no other sample of the same client fires."""
    layer = attack.tamper(model).layer_of(0)
    fired = ((layer.rows(batch.inputs.flatten(1)) > 0) & (layer.rows(batch.inputs.flatten(1)) < 1)).float()  # (B, k)
    return int((fired @ fired.sum(0) == 1).sum())


def test_the_columns_of_a_client_are_what_it_would_have_sent_alone(model, clients) -> None:
    attack = attack_for(CLIENTS)
    rigged = attack.tamper(model)
    together = dm.observe(rigged, clients)
    total = sum(len(one.inputs) for one in clients)
    for number, batch in enumerate(clients):
        layer = rigged.layer_of(number)
        own = dm.FedSGD()(layer, batch.inputs, batch.targets, dm.CrossEntropy())
        copies, marks = rigged.columns_of(together.update["rows.weight"] * total / len(batch.inputs), number)
        torch.testing.assert_close(copies / rigged.scale, own["rows.weight"], rtol=1e-4, atol=1e-9)
        torch.testing.assert_close(marks, own["rows.bias"], rtol=1e-4, atol=1e-9)


def test_every_clients_lone_samples_come_back_under_its_number(model, clients) -> None:
    attack = attack_for(CLIENTS)
    each = attack.of_clients(dm.observe(attack.tamper(model), clients))
    found = [right(one, batch) for one, batch in zip(each, clients, strict=True)]
    assert found == [alone_in_bins(attack, model, batch) for batch in clients]
    assert sum(found) >= 40
    together = dm.reconstruct(dm.observe(attack.tamper(model), clients), attack)
    assert len(together.inputs) == sum(found)
    assert "client 2: 1 samples found alone; nothing is left in any bin" in together.message


def test_the_scale_keeps_the_bins_apart_over_local_steps(model, clients) -> None:
    training = dm.FedAvg(learning_rate=0.01, mini_batch=4, epochs=2)
    found = {}
    for scale in (1.0, 2.0**15):
        attack = attack_for(CLIENTS, scale=scale)
        each = attack.of_clients(dm.observe(attack.tamper(model), clients, training=training))
        found[scale] = sum(right(one, batch) for one, batch in zip(each, clients, strict=True))
    assert found[1.0] <= 1  # of the one client that has a single sample
    assert found[2.0**15] >= sum(alone_in_bins(attack, model, batch) for batch in clients)  # of two that share a row, the first stays


def test_a_client_alone_and_batch_norm_in_train_mode() -> None:
    model, batch, attack = load_model("convnet", {"size": 16, "width": 2}, None, 4), pictures(12, 2), attack_for(1)
    assert model.training
    found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
    assert right(found, batch) >= 9
    unknown = dm.reconstruct(dm.observe(attack.tamper(model), batch, declare_batch_size=False), attack)
    assert right(unknown, batch) >= 9


def test_normalised_inputs_pass(model) -> None:
    scale = dm.Normalization(mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.3))
    pixels = pictures(12, 5)
    mean, std = (torch.tensor(values).reshape(1, 3, 1, 1) for values in (scale.mean, scale.std))
    batch = dm.Batch((pixels.inputs - mean) / std, pixels.targets)
    attack = attack_for(1, normalization=scale)
    assert right(dm.reconstruct(dm.observe(attack.tamper(model), batch, normalization=scale), attack), batch) >= 9


def test_noise_on_the_mean_leaves_nothing_to_claim(model, clients) -> None:
    attack, noise = attack_for(CLIENTS), dm.defense("gaussian_noise", std=1.0)
    assert not len(dm.reconstruct(dm.observe(attack.tamper(model), clients, defenses=(noise,)), attack).inputs)


def test_another_round_parts_samples_that_shared_a_bin(model) -> None:
    batch, attack = pictures(30, 8), attack_for(1, bins=24)
    found = dm.reconstruct(dm.observe(attack.tamper(model), batch), attack)
    later = attack.after(found)
    again = dm.reconstruct(dm.observe(later.tamper(model), batch), later)
    seen = [torch.cdist(one.inputs.flatten(1), batch.inputs.flatten(1)).argmin(1) for one in (found, again)]
    assert len(torch.cat(seen).unique()) > max(len(one) for one in seen)


@pytest.mark.parametrize("number", [0, 3])
def test_inspect_sees_the_rows_whichever_client_looks(model, number) -> None:
    rigged = attack_for(CLIENTS).tamper(model).of_client(number).eval()
    for found in (dm.inspect(rigged), dm.inspect(rigged, pictures(6, 1))):
        assert "parallel_rows" in {one.check for one in found.findings if one.suspicious}


def test_refusals(model, clients) -> None:
    attack = attack_for(2)
    with pytest.raises(dm.Refused, match="needs a model that bears its layer"):
        dm.reconstruct(dm.observe(model, clients), attack)
    with pytest.raises(ValueError, match="at least the 3 clients that train, got 2"):
        dm.observe(attack.tamper(model), clients)
    with pytest.raises(dm.Refused, match="has loki's layer already"):
        attack.tamper(attack.tamper(model))
    with pytest.raises(dm.Refused, match=r"needs inputs \(channels, height, width\), and these are \(64,\)"):
        Loki(input_shape=(64,)).tamper(nn.Sequential(nn.Linear(64, 10)))
    withheld = dm.observe(attack.tamper(model), clients[:2], defenses=(dm.defense("only_layer", layer="body.fc"),))
    with pytest.raises(dm.Refused, match="reads the gradient of the inserted layer"):
        dm.reconstruct(withheld, attack)


def test_a_declared_size_that_contradicts_the_clients_is_refused(model, clients) -> None:
    attack = attack_for(CLIENTS)
    exposure = dm.observe(attack.tamper(model), clients)
    fewer = replace(exposure, public=replace(exposure.public, batch_size=51))
    with pytest.raises(dm.Refused, match="sum to the declared batch size 51; they sum to 52"):
        dm.reconstruct(fewer, attack)


def test_no_client_is_sent_anothers_kernels(model) -> None:
    rigged = attack_for(3).tamper(model)
    before = copy.deepcopy(rigged.state_dict())
    other = rigged.of_client(2)
    assert int((other.maps.weight.flatten(1) != 0).any(1).nonzero().min()) == 6
    assert other.marks.tolist() == [0, 0, 1]
    assert all(torch.equal(before[key], value) for key, value in rigged.state_dict().items())
