"""TF32 is off where Dosimeter computes, and the caller's setting comes back."""

from dataclasses import dataclass

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.interfaces import Attack
from dosimeter.precision import tf32
from dosimeter.types import Reconstruction


def _setting():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


def _fail_inside(allowed):
    with tf32(allowed):
        assert _setting() == (allowed, allowed)
        raise RuntimeError


def test_the_callers_setting_comes_back_after_an_error():
    before = _setting()
    with pytest.raises(RuntimeError):
        _fail_inside(not before[1])
    assert _setting() == before


class Watching(nn.Linear):
    """A layer that refuses to run while TF32 is allowed and a gradient is computed."""

    def forward(self, inputs):
        if torch.is_grad_enabled():
            assert _setting() == (False, False)
        return super().forward(inputs)


@dataclass(frozen=True, kw_only=True)
class Looking(Attack):
    """Looks at the setting."""

    def __call__(self, exposure, labels, rng):
        assert _setting() == (False, False)
        return Reconstruction(inputs=torch.zeros(2, 4), labels=torch.zeros(2, dtype=torch.int64), objective=0.0)


def test_methods_run_in_full_single_precision():
    batch = dm.Batch(torch.rand(2, 4), torch.tensor([0, 1]))
    with tf32(allowed=True):
        exposure = dm.observe(nn.Sequential(Watching(4, 3)), batch)
        dm.reconstruct(exposure, Looking())
        assert _setting() == (True, True)
