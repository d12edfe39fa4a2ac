"""Adapters: the names that PEFT sends, frozen layers around them, and what is proved of them. PEFT itself where it is installed."""

import copy

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.client.sent_tensors import adapter_names

STEP = dm.FedAvg(learning_rate=0.1, steps=1)


class Lora(nn.Module):
    """A layer as PEFT wraps it, by hand: W x + B A x with W frozen."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base.in_features, rank, bias=False)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base.out_features, bias=False)})

    def forward(self, inputs):
        return self.base_layer(inputs) + self.lora_B["default"](self.lora_A["default"](inputs))


class Saved(nn.Module):
    """What PEFT puts in place of a module of `modules_to_save`."""

    def __init__(self, original: nn.Linear) -> None:
        super().__init__()
        self.modules_to_save = nn.ModuleDict({"default": copy.deepcopy(original)})
        self.original_module = original.requires_grad_(False)

    def forward(self, inputs):
        return self.modules_to_save["default"](inputs)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(64, 32), nn.Linear(32, 24), nn.Linear(24, 10)

    def forward(self, inputs):
        return self.head(torch.relu(self.fc2(torch.relu(self.fc1(inputs.flatten(1))))))


def wrapped() -> nn.Module:
    torch.manual_seed(0)
    net = Net()
    net.fc1, net.fc2, net.head = Lora(net.fc1, 4), Lora(net.fc2, 4), Saved(net.head)  # pyright: ignore[reportAttributeAccessIssue]
    return net.eval()


def after_step(server, batch):
    client = copy.deepcopy(server)
    optimizer = torch.optim.SGD([parameter for parameter in client.parameters() if parameter.requires_grad], lr=0.1)
    nn.functional.cross_entropy(client(batch.inputs), batch.targets).backward()
    optimizer.step()
    return client


def short(client):
    """The state dict of an adapter as PEFT names it."""
    known = {own: name for name, own in adapter_names(client).items()}
    return {known[name]: value.detach() for name, value in client.named_parameters() if value.requires_grad}


def check(server, sent, batch, prefix=""):
    exposure = dm.receive(server, sent, kind="weights", training=STEP, batch_size=len(batch.targets), input_shape=(1, 8, 8))
    assert set(exposure.update) == {name for name, parameter in server.named_parameters() if parameter.requires_grad}
    labels = dm.recover_labels(exposure, "subspace")
    assert labels.certified
    assert labels.labels.tolist() == sorted(batch.targets.tolist())
    features = dm.recover_features(exposure, "subspace")
    assert bool(features.certified.all())
    inner = server.get_submodule(prefix) if prefix else server
    hidden = torch.relu(inner.fc2(torch.relu(inner.fc1(batch.inputs.flatten(1)))))
    cosines = nn.functional.cosine_similarity(features.features[:, None].double(), hidden[None].double(), dim=2)
    assert float(cosines.detach().amax(1).min()) > 0.999


def test_what_an_adapter_sends_is_received_and_proved(batch):
    server = wrapped()
    sent = short(after_step(server, batch))
    assert {"fc1.lora_A.weight", "fc2.lora_B.weight", "head.weight", "head.bias"} <= set(sent)
    check(server, sent, batch)


def test_the_whole_state_dict_is_received_too(batch):
    server = wrapped()
    check(server, after_step(server, batch).state_dict(), batch)


def test_a_frozen_layer_that_moved_is_refused(batch):
    server = wrapped()
    sent = after_step(server, batch).state_dict()
    sent["fc1.base_layer.weight"] += 0.01
    with pytest.raises(ValueError, match=r"fc1\.base_layer\.weight"):
        dm.receive(server, sent, kind="weights", training=STEP, batch_size=len(batch.targets), input_shape=(1, 8, 8))


def test_the_name_of_the_layer_before_it_was_wrapped():
    assert adapter_names(wrapped())["fc1.weight"] == "fc1.base_layer.weight"
    assert adapter_names(Net()) == {}


def test_a_name_of_two_adapters_is_that_of_the_trained_one():
    net = wrapped()
    net.fc1.lora_A["other"] = nn.Linear(64, 4, bias=False)  # pyright: ignore[reportIndexIssue]
    assert "fc1.lora_A.weight" not in adapter_names(net)
    net.fc1.lora_A["other"].requires_grad_(False)  # pyright: ignore[reportIndexIssue]
    assert adapter_names(net)["fc1.lora_A.weight"] == "fc1.lora_A.default.weight"


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"use_rslora": True, "bias": "lora_only"}])
def test_peft_itself(batch, options):
    peft = pytest.importorskip("peft", reason="peft is not installed")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["fc1", "fc2"], modules_to_save=["head"], init_lora_weights=False, **options)
    server = peft.get_peft_model(Net(), config).eval()
    sent = peft.get_peft_model_state_dict(after_step(server, batch))
    check(server, sent, batch, "base_model.model")
