import copy

import pytest
import torch
from torch import nn

import dosimeter as dm


class _Residual(nn.Module):
    """A stem and one residual block with batch norm, pooled into a linear head."""

    def __init__(self, channels):
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.block, self.last = nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels)
        self.head = nn.Linear(channels, 10)

    def forward(self, images):
        hidden = self.norm(self.stem(images)).relu()
        return self.head((hidden + self.last(self.block(hidden))).relu().mean((2, 3)))


def _sent(model, batch, **options):
    return dm.observe(model, batch, defenses=(dm.defense("fewer_channels", **options),)).update


@pytest.mark.parametrize("mode", [True, False])
@pytest.mark.parametrize(("kept", "left"), [(0.5, 4), (0.3, 3), (0.01, 1)])
def test_it_is_the_update_of_the_smaller_model(batch, kept, left, mode):
    torch.manual_seed(0)
    whole, small = _Residual(8).double().train(mode), _Residual(left).double().train(mode)
    for norm in (whole.norm, whole.last):  # channels that batch norm alone would wake up again
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    state = whole.state_dict()
    small.load_state_dict({name: state[name][tuple(slice(n) for n in value.shape)] for name, value in small.state_dict().items()})
    images = dm.Batch(batch.inputs.double(), batch.targets)
    sent, expected = _sent(whole, images, kept=kept), dm.observe(small, images).update
    for name, change in expected.items():
        corner = tuple(slice(n) for n in change.shape)
        torch.testing.assert_close(sent[name][corner], change, rtol=1e-9, atol=1e-12)
        assert int(sent[name].count_nonzero()) == int(change.count_nonzero())


def test_all_channels_are_the_identity_and_a_copy_keeps_the_rest_shut(classifier, batch):
    plain = dm.observe(classifier, batch).update
    assert all(torch.equal(change, plain[name]) for name, change in _sent(classifier, batch, kept=1.0).items())
    exposure = dm.observe(classifier, batch, defenses=(dm.defense("fewer_channels", kept=0.5),))
    replayed = exposure.public.training(copy.deepcopy(exposure.model), batch.inputs, batch.targets, exposure.public.loss)
    assert all(torch.equal(replayed[name], change) for name, change in exposure.update.items())


def test_a_model_without_convolutions_is_refused(batch):
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    with pytest.raises(dm.Refused, match="needs convolutions"):
        _sent(model, batch)


def test_no_channels_at_all_are_refused():
    with pytest.raises(ValueError, match=r"defense\.kept: expected a number in \(0, 1\]"):
        dm.defense("fewer_channels", kept=0.0)
