"""What a gradient can determine at all."""

import pytest
import torch
from torch import nn

import dosimeter as dm
from dosimeter.engines.identifiability import counting_sentences, identifiability


def exposed(size: int, classes: int = 10, features: int = 32, **options):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(16, features), nn.ReLU(), nn.Linear(features, classes)).eval()
    rng = torch.Generator().manual_seed(size)
    return dm.observe(
        model, dm.Batch(torch.rand(size, 1, 4, 4, generator=rng), torch.randint(0, classes, (size,), generator=rng)), **options
    )


def test_the_rank_is_the_batch_size_below_the_bound():
    found = identifiability(exposed(5, declare_batch_size=False))
    assert found.batch_size == 5
    assert found.separable == 5
    head = found.layers[-1]
    assert (head.kind, head.bound, head.rank) == ("head", 9, 5)
    assert head.smallest_kept > 100 * head.largest_dropped
    assert "all of them together" in head.sentence


def test_a_batch_beyond_the_bound_is_told_in_one_sentence():
    found = identifiability(exposed(64))
    assert "at most 9 of these 64 samples" in found.sentence


def test_features_can_be_the_bound():
    found = identifiability(exposed(30, classes=40, features=8))
    assert found.layers[-1].bound == 8
    assert "8 features" in found.sentence


def test_noise_lowers_the_rank():
    noisy = identifiability(exposed(5, defenses=(dm.defense("gaussian_noise", std=0.003),)))
    assert noisy.separable < 5
    assert "of these 5 samples" in noisy.sentence


def test_inner_layers_are_listed_and_a_withheld_head_is_said():
    exposure = exposed(5)
    without = type(exposure)(
        model=exposure.model, update={k: v for k, v in exposure.update.items() if not k.startswith("3.")}, public=exposure.public
    )
    found = identifiability(without)
    assert found.separable is None
    assert "no head gradient" in found.sentence
    assert [layer.kind for layer in found.layers] == ["linear"]
    assert "every sample's input" in found.layers[0].sentence


def test_behind_a_defense_the_rank_is_not_taken_for_the_batch_size():
    found = identifiability(exposed(5, defenses=(dm.defense("clipping", max_norm=0.01, mode="value"),), declare_batch_size=False))
    assert found.batch_size is None
    assert "need not be the number of samples" in found.sentence


@pytest.mark.parametrize("options", [{}, {"declare_batch_size": False}, {"defenses": (dm.defense("head_withheld"),)}])
def test_the_head_alone_says_the_same_of_the_batch(options):
    whole, head = identifiability(exposed(5, **options)), identifiability(exposed(5, **options), inner=False)
    assert (head.batch_size, head.separable, head.sentence) == (whole.batch_size, whole.separable, whole.sentence)
    assert head.layers == tuple(layer for layer in whole.layers if layer.kind == "head")


def test_equations_are_counted_against_unknowns():
    enough, alone = counting_sentences(exposed(2))  # 16 × 32 + 32 + 32 × 10 + 10 numbers for 2 × 16 pixels
    assert (
        enough == "the update has 874 numbers for 32 unknown ones of 2 inputs: enough for every unknown, which promises nothing by itself"
    )
    assert alone.startswith("3 of 4 parameters have enough numbers alone; the largest, 1.weight, has 512")
    (few,) = counting_sentences(exposed(200))
    assert "too few by 2,326: without a prior" in few
    assert counting_sentences(exposed(2, declare_batch_size=False)) == []
