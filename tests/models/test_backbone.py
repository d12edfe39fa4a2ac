"""A new head on a trained backbone: everything but the head comes from the file, and what does not fit is refused."""

import pytest
import torch
from safetensors.torch import save_file

from dosimeter.models.backbone import load_backbone
from dosimeter.models.loading import load_model


def test_everything_but_the_head_comes_from_the_file(tmp_path):
    donor = load_model("resnet18", {"classes": 10}, None, 1)
    model = load_model("resnet18", {"classes": 37, "pooling": False}, None, 2)
    own = model.fc.weight.detach().clone()
    save_file({name: tensor.contiguous() for name, tensor in donor.state_dict().items()}, tmp_path / "donor.safetensors")
    load_backbone(model, tmp_path / "donor.safetensors", head="fc")
    assert torch.equal(model.fc.weight, own)
    assert model.fc.weight.shape == (37, 512 * 16)
    theirs = donor.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items() if not name.startswith("fc."))


def test_what_does_not_fit_is_refused(tmp_path):
    model = load_model("resnet18", {"classes": 10}, None, 0)
    state = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if not name.startswith(("fc.", "layer4."))}
    save_file(state, tmp_path / "part.safetensors")
    with pytest.raises(ValueError, match=r"\d+ missing \(layer4"):
        load_backbone(model, tmp_path / "part.safetensors", head="fc")
    with pytest.raises(ValueError, match="head: the model has no layer 'classifier'"):
        load_backbone(model, tmp_path / "part.safetensors", head="classifier")
