"""The objective's parts over the steps: layers, priors, dropout masks, and the final terms."""

import pytest
import torch
from torch import Generator

from dosimeter.engines.matching.priors import TotalVariation
from dosimeter.engines.matching.schedules import Layers
from dosimeter.engines.matching.terms import TermSchedule, evaluate_final

LAYERS = ("0.weight", "0.bias", "3.weight", "3.bias")


def test_layers_enter_from_the_deep_end_by_name_or_by_weight(make) -> None:
    schedule = TermSchedule(make(layers=Layers(shares=2, every=0.5)))
    names, terms = schedule.at(0.2, Generator())
    assert names == LAYERS[2:]
    assert terms.layers is None
    names, terms = schedule.at(0.2, Generator(), one_layer_set=True)
    assert names == LAYERS
    assert terms.layers.tolist() == [0.0, 0.0, 1.0, 1.0]
    assert schedule.at(0.6, Generator())[0] == LAYERS


def test_priors_and_matching_begin_at_their_onset(make) -> None:
    schedule = TermSchedule(make(priors=(TotalVariation(weight=0.1, onset=0.5),), matching_onset=0.25))
    found = [schedule.at(progress, Generator())[1] for progress in (0.0, 0.3, 0.5)]
    assert [float(terms.matching) for terms in found] == [0.0, 1.0, 1.0]
    assert [terms.priors.tolist() for terms in found] == [[0.0], [0.0], pytest.approx([0.1])]


def test_a_step_has_a_fresh_mask_and_the_end_has_none(make) -> None:
    schedule, rng = TermSchedule(make(dropout=0.3)), Generator().manual_seed(0)
    first, second = (schedule.at(0.5, rng)[1].masks for _ in range(2))
    hidden = torch.cat([1 - mask.flatten() for mask in first]).mean()
    assert 0.2 < float(hidden) < 0.4
    assert not torch.equal(first[2], second[2])
    assert schedule.final()[1].masks is None
    assert all(bool((mask == 1).all()) for mask in schedule.final(one_layer_set=True)[1].masks)


def test_a_constant_is_sent_to_the_device_once(make) -> None:
    schedule = TermSchedule(make(priors=(TotalVariation(weight=0.1),)))
    assert schedule.at(0.1, Generator())[1].priors is schedule.at(0.9, Generator())[1].priors


def test_the_final_objective_is_the_distance_plus_the_weighted_priors(make, exposed) -> None:
    problem = make(priors=(TotalVariation(weight=0.5, onset=0.9),), dropout=0.3)
    inputs = torch.rand(1, 2, 1, 6, 6, generator=Generator().manual_seed(1)).double()
    found = evaluate_final(problem, inputs)
    variation = inputs.diff(dim=-1).abs().mean() + inputs.diff(dim=-2).abs().mean()
    exposure, labels = exposed
    update = exposure.public.training(exposure.model, inputs[0], labels.labels, exposure.public.loss)
    one, other = (torch.cat([side[name].flatten() for name in LAYERS]) for side in (update, exposure.update))
    assert float(found.distance) == pytest.approx(1 - float(torch.cosine_similarity(one, other, dim=0)), rel=1e-9)
    assert float(found.objective) == pytest.approx(float(found.distance + 0.5 * variation), rel=1e-9)
