"""The facts of a capture: whole there and back, checked when read, and held against the model."""

import json

import pytest
import torch

import dosimeter as dm
from dosimeter.captures.capture import FORMAT, Capture, hash_of, read_facts, write_facts

FACTS = {
    "kind": "difference",
    "round": 4,
    "client": "hospital 7",
    "clients": 3,
    "training": dm.FedAvg(learning_rate=0.05, epochs=2, mini_batch=8, momentum=0.9),
    "loss": dm.CrossEntropy(smoothing=0.1),
    "defenses": (dm.defense("gaussian_noise", std=0.01),),
    "privacy": dm.privacy("flower_local_dp", clipping_norm=1.0, sensitivity=2.0, epsilon=1.0, delta=1e-5),
    "batch_size": 32,
    "input_shape": (1, 8, 8),
    "normalization": dm.Normalization(mean=(0.5,), std=(0.25,)),
    "mode": "train",
    "framework": "flower 1.13",
    "before": "ab" * 32,
}


def test_facts_survive_json():
    capture = Capture(update={"w": torch.ones(2, dtype=torch.float16)}, **FACTS)
    text = write_facts(capture)
    assert json.loads(text)["format"] == FORMAT
    assert json.loads(text)["dtypes"] == ["float16"]
    assert read_facts(text) == capture.facts


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"format": FORMAT + 1}, "format: is 3, and this version of Dosimeter reads formats up to 2; install a newer one"),
        ({"format": True}, "format: expected a positive int"),
        ({"kind": "weight"}, "kind: expected one of"),
        ({"round": -1}, "round: expected an int of at least 0, got -1"),
        ({"flavour": "sweet"}, "flavour"),
        ({"training": {"name": "os:system"}}, "training"),
        ({"training": {"name": "fedavg", "steps": 0}}, "training.steps: expected a positive int, got 0"),
        ({"client": "x" * 1000}, "client: expected at most 128 characters"),
        ({"before": "zz"}, "before: expected 64 hexadecimal digits"),
        ({"batch_size": 1e400}, "number"),
    ],
)
def test_facts_are_checked(change, sentence):
    text = json.dumps({"format": FORMAT, "kind": "weights"} | change)
    with pytest.raises(ValueError, match=sentence):
        read_facts(text)


def test_the_hash_sees_names_types_shapes_and_bits():
    state = {"a": torch.tensor([1.0, 2.0]), "b": torch.ones(2, 2)}
    others = (
        {"a": state["a"], "c": state["b"]},
        {"a": state["a"], "b": state["b"].flatten()},
        {"a": state["a"].view(torch.int32), "b": state["b"]},
        {"a": torch.tensor([1.0, 2.0000002]), "b": state["b"]},
    )
    assert len({hash_of(state), *map(hash_of, others)}) == 5
    assert hash_of(dict(reversed(state.items()))) == hash_of(state)


def test_a_capture_is_received_with_its_facts(classifier, batch):
    training = dm.FedAvg(learning_rate=0.1, steps=1)
    sent = dm.observe(classifier, batch, training=training)
    after = {name: parameter - 0.1 * sent.update[name] for name, parameter in classifier.state_dict().items()}
    known = {"kind": "weights", "training": training, "batch_size": 6, "input_shape": (1, 8, 8)}
    capture = Capture(update=after, before=hash_of(classifier.state_dict()), mode="eval", **known)
    exposure = capture.receive(classifier)
    assert (exposure.public.batch_size, exposure.public.training) == (6, training)
    assert torch.allclose(exposure.update["5.bias"], sent.update["5.bias"], atol=1e-5)
    assert capture.receive(classifier, batch_size=3).public.batch_size == 3
    with pytest.raises(ValueError, match="trained in eval mode"):
        capture.receive(classifier.train())
    classifier.eval()[5].bias.data += 1
    with pytest.raises(ValueError, match="not the weights that were sent"):
        capture.receive(classifier)
