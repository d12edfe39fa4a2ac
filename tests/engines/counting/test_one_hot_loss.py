"""The sign rule: granted under a softmax loss without smoothing, refused with the reason elsewhere."""

import pytest
from torch import nn

import dosimeter as dm
from dosimeter.client.losses import CrossEntropy
from dosimeter.engines.counting.one_hot_loss import require_sign_rule


def test_plain_cross_entropy_is_granted(classifier, batch):
    require_sign_rule(dm.observe(classifier, batch), "idlg")


def test_smoothing_and_losses_without_a_softmax_are_refused(classifier, batch):
    with pytest.raises(dm.Refused, match="idlg reads presence off signs"):
        require_sign_rule(dm.observe(classifier, batch, loss=CrossEntropy(smoothing=0.1)), "idlg")
    lone = nn.Sequential(nn.Flatten(), nn.Linear(64, 1))
    halves = dm.Batch(batch.inputs, (batch.targets > 4).long())
    with pytest.raises(dm.Refused, match="llg needs a softmax loss"):
        require_sign_rule(dm.observe(lone, halves, loss="binary_cross_entropy"), "llg")
