import torch
from torch import nn
from torch.nn.utils import prune

from dosimeter.network.copies import deep_copy


def test_a_pruned_model_is_copied_whole_and_shares_nothing():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2))
    prune.l1_unstructured(model[0], "weight", amount=0.5)
    inputs = torch.rand(5, 4)
    wanted = model(inputs)
    twin = deep_copy(model)
    assert torch.equal(twin(inputs), wanted)
    twin[0].weight_orig.data.zero_()
    assert torch.equal(model(inputs), wanted)
    assert not torch.equal(twin(inputs), wanted)
