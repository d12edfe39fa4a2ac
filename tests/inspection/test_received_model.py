"""The model as the checks see it, and what is no model to inspect."""

import pytest
import torch
from torch import nn

from dosimeter.inspection.received_model import PROBES, check_weights, receive_model
from dosimeter.types import Batch, Refused


@pytest.fixture
def model() -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Flatten(), nn.Linear(768, 24), nn.ReLU(), nn.Linear(24, 10)).train()


def test_layers_inputs_and_logits_are_the_models_own(model, data):
    batch = data(16, 3)
    received = receive_model(model, batch, None)
    assert [layer.name for layer in received.linear] == ["1", "3"]
    assert [layer.name for layer in received.hidden] == [layer.name for layer in received.on_input] == ["1"]
    assert received.head.name == "3"
    torch.testing.assert_close(received.head.received, model[:3](batch.inputs))
    torch.testing.assert_close(received.logits, model(batch.inputs))
    assert torch.equal(received.labels, batch.targets)
    assert model.training
    assert not received.model.training


def test_soft_labels_stand_for_their_likeliest_class(model, data):
    batch = data(16, 3)
    received = receive_model(model, Batch(batch.inputs, 0.9 * torch.eye(10)[batch.targets] + 0.01), None)
    assert torch.equal(received.labels, batch.targets)


def test_without_data_there_are_probes_in_the_range_of_pixels(model):
    received = receive_model(model, None, None)
    assert received.inputs.shape == (PROBES, 3, 16, 16)
    assert (float(received.inputs.min()), float(received.inputs.max())) == (0.0, 1.0)
    assert torch.equal(received.inputs, receive_model(model, None, None).inputs)
    assert received.targets is None


def test_half_precision_is_computed_in_single(model, data):
    received = receive_model(model.half(), data(16, 3), None)
    assert received.logits.dtype == torch.float32
    assert next(model.parameters()).dtype == torch.float16


def test_what_takes_the_input_again_behind_a_linear_layer_is_recorded(data):
    square = nn.Sequential(nn.Flatten(), nn.Linear(48, 48), nn.Linear(48, 48), nn.Linear(48, 10))
    received = receive_model(square, data(4, 3), None)
    assert [x.shape for x in received.later_inputs] == [(12, 48), (12, 48)]
    torch.testing.assert_close(received.later_inputs[0], square[:2](data(4, 3).inputs))


def test_what_is_no_model_of_finite_weights_is_refused(model):
    for path, hint in (("model", "got OrderedDict"), ("reference", "load the weights into a copy")):
        with pytest.raises(TypeError, match=hint):
            check_weights(model.state_dict(), path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has no parameters"):
        check_weights(nn.Flatten(), "model")
    with pytest.raises(ValueError, match=r"model: '0\.weight' has no values yet"):
        check_weights(nn.Sequential(nn.LazyLinear(5)), "model")
    model[3].bias.data[0] = torch.inf
    with pytest.raises(ValueError, match=r"reference: has NaN or infinite entries in '3\.bias'"):
        receive_model(nn.Linear(4, 2), None, model)


def test_a_model_that_no_probe_passes_is_refused():
    with pytest.raises(Refused, match="batch of your own data"):
        receive_model(nn.Sequential(nn.Embedding(5, 4)), None, None)
