"""Inspect: rigged models are seen with data and without, honest ones of every kind pass, and nothing is changed."""

import copy
import json
import math
import warnings

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import dosimeter as dm
from dosimeter.cli import main
from dosimeter.inspection.command import run_inspect
from dosimeter.inspection.inspect import CHECKS, THRESHOLDS, inspect
from dosimeter.inspection.pruning import rows_that_count
from dosimeter.models import loading
from dosimeter.models.loading import load_model

ARCHITECTURES = {
    "fcn3": {"hidden": (48, 32)},
    "lenet5": {"size": 20},
    "small_cnn": {"width": 4},
    "convnet": {"width": 2},
    "resnet20": {},
}
ATTACKS = {
    "fishing": {"target": 2},
    "fishing by a feature": {"target": 2, "feature": 1, "cutoff": 0.1},
    "gradfilt": {"targets": (2,)},
    "gradfilt_imprint": {"targets": (2, 5), "expected": 20},
    "imprint": {"bins": 200},
    "imprint sparse": {"bins": 200, "sparse": True},
    "loki": {"bins": 200, "clients": 3},
    "trap_weights": {"rows": 200},
}


def honest(name: str, seed: int, **options) -> nn.Module:
    return load_model(name, {"size": 16, **ARCHITECTURES[name], **options}, None, seed).eval()


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("attack", list(ATTACKS))
def test_every_active_attack_is_seen(name, attack, data) -> None:
    size = ARCHITECTURES[name].get("size", 16)
    rigged = dm.attack(attack.split()[0], input_shape=(3, size, size), **ATTACKS[attack]).tamper(honest(name, 31))
    assert inspect(rigged).suspicious
    assert inspect(rigged, data(size, 4)).suspicious
    assert inspect(rigged, data(size, 4), honest(name, 31)).suspicious


@pytest.mark.parametrize("name", list(ARCHITECTURES))
@pytest.mark.parametrize("seed", [1, 2])
def test_honest_models_pass(name, seed, data) -> None:
    size = ARCHITECTURES[name].get("size", 16)
    model = honest(name, seed)
    assert not inspect(model).suspicious
    found = inspect(model, data(size, seed), copy.deepcopy(model))
    assert not found.suspicious, str(found)


@pytest.mark.parametrize("classes", [2, 100, 1000])
def test_honest_models_pass_whatever_the_number_of_classes(classes) -> None:
    model = honest("resnet20", 3, classes=classes)
    assert not inspect(model).suspicious


def test_half_precision_pruning_and_an_unbalanced_bias_are_honest(data) -> None:
    model = honest("small_cnn", 5)
    assert not inspect(copy.deepcopy(model).half()).suspicious
    pruned, leaning = copy.deepcopy(model), copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (p for p in pruned.parameters() if p.ndim > 1):
            cut = parameter.abs().flatten().quantile(0.8)
            parameter.masked_fill_(parameter.abs() < cut, 0.0)
        leaning.fc.bias.add_(torch.linspace(0, -6.9, 10))
    assert not inspect(pruned, data(16, 1)).suspicious
    assert not inspect(leaning, data(16, 1)).suspicious


def pruned(model: nn.Module, share: float) -> nn.Module:
    model = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in (p for p in model.parameters() if p.ndim > 1):
            parameter.masked_fill_(parameter.abs() <= parameter.abs().flatten().quantile(share), 0.0)
    return model


@pytest.mark.parametrize("seed", range(4))
def test_rows_that_pruning_emptied_are_no_filter(seed, data) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Flatten(), nn.Linear(768, 6), nn.ReLU(), nn.Linear(6, 100))
    batch, cut = data(16, seed), pruned(model, 0.9)
    assert int((cut[3].weight == 0).all(1).sum()) > 30
    for found in (inspect(cut), inspect(cut, batch), inspect(cut, batch, pruned(model, 0.5))):
        assert not found.suspicious, str(found)
    rigged = dm.attack("gradfilt", targets=(int(batch.targets[0]),), bias=7.5, input_shape=(3, 16, 16)).tamper(honest("small_cnn", seed))
    assert inspect(rigged, batch).suspicious  # its one row that is left is as full as it was


def test_the_chance_of_an_empty_row_is_the_one_of_its_density() -> None:
    weight = torch.rand(4000, 10, generator=torch.Generator().manual_seed(2)) + 0.1
    weight[torch.rand(4000, 10, generator=torch.Generator().manual_seed(3)) < 0.8] = 0.0
    assert torch.equal(rows_that_count(weight), (weight != 0).any(1))  # .8^10 = .11 of the rows are empty, as they should be
    weight[: len(weight) // 2] = 0.0
    assert rows_that_count(weight).all()


def test_a_head_that_pruning_cut_off_from_its_features_hides_nothing(data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 20), nn.ReLU(), nn.Linear(20, 10))
    with torch.no_grad():
        model[1].weight[10:] = 0.0  # ten features vary and ten do not
        model[3].weight[:, :10] = 0.0
    found = inspect(model, data(16, 2))
    assert "constant_output" in found.left_out
    assert not found.suspicious, str(found)


def test_rows_that_one_step_of_adam_made_of_zero_are_no_traps(data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 40), nn.ReLU(), nn.Linear(40, 2))
    with torch.no_grad():
        model[3].weight.copy_(0.001 * torch.tensor([[1.0, -1.0], [-1.0, 1.0]]).repeat(1, 20))
    batch = data(16, 3)
    found = inspect(model, dm.Batch(batch.inputs, batch.targets % 2))
    assert not found.suspicious, str(found)


def test_a_zero_head_is_where_fine_tuning_begins(data) -> None:
    model, batch = honest("small_cnn", 11, classes=100), dm.Batch(data(16, 8).inputs, torch.arange(12) % 10)
    nn.init.zeros_(model.fc.weight)
    nn.init.zeros_(model.fc.bias)
    assert not inspect(model).suspicious
    assert not inspect(model, batch).suspicious
    tuned = copy.deepcopy(model)
    nn.functional.cross_entropy(tuned(batch.inputs), batch.targets).backward()
    torch.optim.SGD(tuned.fc.parameters(), lr=0.1).step()  # the rows of the 90 classes that nobody has are now all alike
    found = inspect(tuned, batch, model)
    assert not found.suspicious, str(found)


def test_features_that_are_all_small_are_no_filter() -> None:
    model = load_model("mobilenet_v2", {}, None, 2).eval()  # untrained, its features are about 1e-10
    assert not inspect(model).suspicious


@pytest.mark.parametrize(
    "model",
    [
        nn.Sequential(nn.Flatten(), nn.Linear(768, 10)),
        nn.Sequential(nn.Flatten(), nn.Linear(768, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Flatten(), nn.Linear(768, 32, bias=False), nn.ReLU(), nn.Linear(32, 10, bias=False)),
        nn.Sequential(nn.Flatten(), nn.Linear(768, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 10)),
    ],
    ids=["logistic regression", "tiny", "no bias", "layer norm"],
)
def test_plain_models_pass(model, data) -> None:
    batch = data(16, 9)
    batch = dm.Batch(batch.inputs, batch.targets % 3)
    assert not inspect(model).suspicious
    assert not inspect(model, batch).suspicious


def test_a_camouflaged_filter_is_told_by_the_classes_that_it_shuts_out(data) -> None:
    model, batch = honest("small_cnn", 12), data(16, 3)
    rigged = dm.attack("gradfilt", targets=(4,), bias=9.0, camouflage=1.0, input_shape=(3, 16, 16)).tamper(model)
    fired = {finding.check: finding for finding in inspect(rigged, batch).findings if finding.suspicious}
    assert set(fired) == {"shut_out_classes"}
    assert fired["shut_out_classes"].statistic == pytest.approx(9.0 - model.fc.bias[4].item(), abs=1e-5)
    dominated = copy.deepcopy(model)
    with torch.no_grad():
        dominated.fc.bias.fill_(-6.8)[0] = 0.0  # one class in nine of ten samples and more
    assert not inspect(dominated, batch).suspicious


def test_a_filter_before_a_softmax_is_seen() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 10))
    rigged = dm.attack("gradfilt", targets=(2,), input_shape=(3, 16, 16)).tamper(model)
    assert not inspect(nn.Sequential(model, nn.Softmax(1))).suspicious
    assert inspect(nn.Sequential(rigged, nn.Softmax(1))).suspicious


def test_one_logit_is_a_classifier_too(data) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 1))
    batch = data(16, 6)
    assert not inspect(model, dm.Batch(batch.inputs, batch.targets % 2)).suspicious


def test_rows_that_are_all_alike_are_as_suspicious_as_zero_ones(data) -> None:
    model = honest("small_cnn", 6)
    rigged = dm.attack("gradfilt", targets=(1,), bias=11.0, input_shape=(3, 16, 16)).tamper(model)
    with torch.no_grad():
        rigged.fc.weight.add_(model.fc.weight[0])
    fired = {finding.check for finding in inspect(rigged, data(16, 2)).findings if finding.suspicious}
    assert {"head_rows", "silenced_classes"} <= fired


def test_the_previous_round_shows_a_replaced_head_and_new_layers() -> None:
    model = honest("small_cnn", 7)
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.fc.weight.copy_(torch.randn(other.fc.weight.shape, generator=torch.Generator().manual_seed(1)))
    shares = {finding.check: finding for finding in inspect(other, reference=model).findings}
    assert shares["previous_round"].suspicious
    assert shares["previous_round"].statistic == 1.0
    rigged = dm.attack("imprint", bins=50, input_shape=(3, 16, 16)).tamper(model)
    layers = {finding.check: finding for finding in inspect(rigged, reference=model).findings}
    assert layers["previous_round"].statistic == math.inf


def test_every_check_has_a_threshold_a_statistic_and_a_sentence(data) -> None:
    model = honest("fcn3", 8)
    found = inspect(model, data(16, 3), model)
    assert {finding.check for finding in found.findings} == set(CHECKS) == set(THRESHOLDS)
    assert all(len(finding.sentence) > 20 for finding in found.findings)
    assert 0 < found.false_positive_rate <= 0.01
    assert "2 of 2060 honest models" in str(found)


def test_the_count_of_isolated_samples_is_the_one_that_a_brute_force_gives(data) -> None:
    model, batch = honest("fcn3", 9), data(16, 5)
    rigged = dm.attack("gradfilt", targets=(int(batch.targets[0]),), input_shape=(3, 16, 16)).tamper(model)
    finding = next(one for one in inspect(rigged, batch).findings if one.check == "isolated_samples")
    shares = torch.stack(
        [
            dm.observe(rigged, dm.Batch(batch.inputs[i : i + 1], batch.targets[i : i + 1])).update["fc3.weight"].norm(dim=1)
            for i in range(len(batch.inputs))
        ]
    )
    lone = shares.argmax(0)[(shares.amax(0) >= 0.99 * shares.sum(0)) & (shares.amax(0) > 0)].unique()
    assert finding.statistic == len(lone)
    assert not finding.suspicious


def test_the_model_is_left_as_it_was(data) -> None:
    model = load_model("convnet", {"size": 16, "width": 2}, None, 1)
    before = copy.deepcopy(model.state_dict())
    inspect(model, data(16, 6), model)
    assert model.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def integers() -> nn.Module:
    with warnings.catch_warnings(action="ignore"):  # torch means to move this function
        return torch.ao.quantization.quantize_dynamic(nn.Sequential(nn.Flatten(), nn.Linear(768, 10)))


def failing() -> nn.Module:
    class Failing(nn.Linear):
        def forward(self, inputs):  # pyright: ignore[reportIncompatibleMethodOverride]
            raise KeyError("weights")

    return nn.Sequential(nn.Flatten(), Failing(768, 10))


def deceiving() -> nn.Module:
    class Deceiving(nn.Linear):
        def state_dict(self, *_, **__):
            raise RuntimeError("no state")

    return Deceiving(4, 2)


@pytest.mark.parametrize("function", ["integers", "nn.Flatten", "failing", "deceiving"])
def test_a_model_that_cannot_be_looked_at_ends_the_command_with_2(function, capsys, monkeypatch) -> None:
    monkeypatch.setattr(loading, "find_function", lambda _: {"nn.Flatten": nn.Flatten}.get(function) or globals()[function])
    assert main(["inspect", f"somewhere:{function}"]) == 2
    assert capsys.readouterr().err.startswith("dosimeter: ")


def test_refusals(data) -> None:
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module"):
        inspect("model")  # pyright: ignore[reportArgumentType]
    broken = honest("fcn3", 1)
    with torch.no_grad():
        broken.fc1.weight[0, 0] = math.nan
    with pytest.raises(ValueError, match="NaN or infinite"):
        inspect(broken)
    with pytest.raises(ValueError, match="reference: has NaN"):
        inspect(honest("fcn3", 1), reference=broken)
    with pytest.raises(TypeError, match=r"reference: expected a torch\.nn\.Module, got OrderedDict; load the weights"):
        inspect(honest("fcn3", 1), reference=broken.state_dict())  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="no parameters"):
        inspect(nn.Flatten(), data(16, 1))
    with pytest.raises(ValueError, match="quantised to integers"):
        inspect(integers(), data(16, 1))
    with pytest.raises(dm.Refused, match="give it a batch of your own data"):
        inspect(nn.Sequential(nn.Conv2d(3, 2, 3), nn.Flatten(), nn.Linear(7, 2)))


def test_the_command_says_clean_suspicious_or_raises(tmp_path, capsys) -> None:
    from safetensors.torch import save_file

    model = honest("small_cnn", 0)
    save_file(model.state_dict(), tmp_path / "before.safetensors")
    rigged = dm.attack("gradfilt", targets=(1,), input_shape=(3, 16, 16)).tamper(model)
    save_file(rigged.state_dict(), tmp_path / "sent.safetensors")
    words = ["small_cnn", "model.size=16", "model.width=4"]
    assert run_inspect([*words, f"model.weights={tmp_path}/before.safetensors"], as_json=True) == 0
    assert json.loads(capsys.readouterr().out)["suspicious"] is False
    sent = [*words, f"model.weights={tmp_path}/sent.safetensors"]
    assert run_inspect(sent, reference=str(tmp_path / "before.safetensors")) == 1
    assert "SUSPICIOUS" in capsys.readouterr().out
    assert run_inspect([*sent, "model.channels=3"], data="photographs", as_json=True) == 1
    capsys.readouterr()
    with pytest.raises(OSError, match="no file"):
        run_inspect([*words, "model.weights=nowhere.safetensors"])
    with pytest.raises(ValueError, match=r"inspect resnet20 model\.weights=sent\.pt"):
        run_inspect(["sent.pt"])
    with pytest.raises(ValueError, match="no model named"):
        run_inspect(["small_cmm"])


def test_a_half_precision_model_takes_a_half_precision_batch(digits) -> None:
    images, labels = digits
    model = load_model("small_cnn", {"channels": 1, "size": 8, "width": 4}, None, 2).bfloat16()
    assert not dm.inspect(model, dm.Batch(images[:8].bfloat16(), labels[:8])).suspicious


def test_one_folder_of_images_says_nothing_of_classes(digits, tmp_path) -> None:
    from PIL import Image

    for index, image in enumerate(digits[0][:6]):
        Image.fromarray((255 * image[0]).byte().numpy()).resize((32, 32)).save(tmp_path / f"{index}.png")
    weights = {
        name: value.contiguous() for name, value in load_model("small_cnn", {"channels": 1, "classes": 10}, None, 3).state_dict().items()
    }
    save_file(weights, tmp_path / "received.safetensors")
    assert run_inspect(["small_cnn", f"model.weights={tmp_path / 'received.safetensors'}"], data=str(tmp_path)) == 0


def test_the_largest_batch_whose_maps_a_layer_gives_away_is_told(capsys) -> None:
    found = inspect(honest("fcn3", 3))
    assert [(one.layer, one.limit) for one in found.exposed] == [("fc1", 48), ("fc2", 32)]
    assert "batches of up to 48" in found.exposure
    assert "no layer's gradient has room" in inspect(honest("small_cnn", 3)).exposure
    assert main(["inspect", "fcn3", "--json"]) in (0, 1)
    assert json.loads(capsys.readouterr().out)["exposed_batches"]
