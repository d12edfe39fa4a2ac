"""Schedules: the learning rate over time, and layers that enter from the deep end."""

import pytest
from torch import nn

from dosimeter.engines.matching.schedules import Layers, Rate, blocks, first_block
from dosimeter.registry import MODELS

NAMES = ("a", "b", "c", "d", "e")


def test_the_rate_falls_in_steps_at_three_five_and_seven_eighths() -> None:
    rate = Rate(start=0.1)
    seen = [rate.at(progress) for progress in (0, 0.374, 0.375, 0.625, 0.875, 0.999)]
    assert seen == pytest.approx([0.1, 0.1, 0.01, 0.001, 0.0001, 0.0001])


def test_the_rate_follows_half_a_cosine_after_a_linear_warm_up() -> None:
    rate = Rate(start=2.0, shape="cosine", warm_up=0.5)
    assert [rate.at(progress) for progress in (0, 0.25, 0.5, 1)] == pytest.approx([0, 0.5 * 2 * (1 + 2**-0.5) / 2, 1.0, 0.0])
    assert Rate(start=2.0, shape="constant").at(0.9) == 2.0


def test_layers_enter_from_the_deep_end_and_skipped_ones_never() -> None:
    layers = Layers(shares=2, every=0.25, skipped=frozenset({"a"}))
    assert layers.at(0, NAMES) == ("d", "e")
    assert layers.at(0.24, NAMES) == ("d", "e")
    assert layers.at(0.25, NAMES) == ("b", "c", "d", "e")
    assert layers.at(1, NAMES) == ("b", "c", "d", "e")
    assert Layers().at(0, NAMES) == NAMES


def test_nine_shares_are_the_published_ten_tensors_of_resnet34_and_end_as_early_in_any_network() -> None:
    for name, at_first in (("resnet34", 10), ("resnet50", 15), ("mobilenet_v2", 17)):
        model = MODELS.build(name)
        names = tuple(name for name, _ in model.named_parameters())
        layers = Layers(shares=9, skipped=first_block(model))
        assert len(layers.at(0, names)) == at_first
        assert layers.at(7.9 / 30, names) != layers.at(8 / 30, names) == layers.ever(names)


def test_skipping_everything_skips_nothing() -> None:
    assert Layers(skipped=frozenset(NAMES)).ever(NAMES) == NAMES


def test_the_first_block_is_the_stem_and_the_first_child_of_several_layers() -> None:
    block = lambda: nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))  # noqa: E731
    model = nn.Sequential()
    for name, child in (("stem", nn.Linear(2, 2)), ("one", block()), ("two", block()), ("three", block()), ("head", nn.Linear(2, 2))):
        model.add_module(name, child)
    assert first_block(model) == {"stem.weight", "stem.bias", "one.0.weight", "one.0.bias", "one.1.weight", "one.1.bias"}
    assert first_block(nn.Sequential(block(), block())) == frozenset()
    assert first_block(nn.Sequential(model, nn.Linear(2, 2))) == {f"0.{name}" for name in first_block(model)}


def test_the_first_block_of_the_papers_networks() -> None:
    resnet, mobilenet = MODELS.build("resnet18"), MODELS.build("mobilenet_v2")
    assert {name.split(".")[0] for name in first_block(resnet)} == {"conv1", "bn1", "layer1"}
    assert {".".join(name.split(".")[:2]) for name in first_block(mobilenet)} == {"features.0", "features.1"}
    assert first_block(MODELS.build("lenet5")) == frozenset()


def test_the_blocks_of_a_network_share_out_its_parameters_and_the_head_goes_with_the_last() -> None:
    model = MODELS.build("resnet20")
    found = blocks(model)
    names = [name for name, _ in model.named_parameters()]
    assert sorted(name for block in found for name in block) == sorted(names)
    assert [len(found), found[0]] == [3, first_block(model)]
    assert {name.split(".")[0] for name in found[2]} == {"layer3", "linear"}
    inner = nn.Sequential()
    inner.add_module("stem", nn.Linear(2, 2))
    inner.add_module("trunk", nn.Sequential(*(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3))))
    inner.add_module("head", nn.Linear(2, 2))
    assert [sorted({name.split(".")[0] for name in block}) for block in blocks(inner)] == [["stem", "trunk"], ["trunk"], ["head", "trunk"]]
