"""What every surface owes: metrics, words and an order; a new surface is covered by being registered."""

import pytest

from dosimeter.registry import METRICS
from dosimeter.surfaces.surface import SURFACES, surface_named, surface_names, surfaces
from dosimeter.surfaces.verdicts import Verdict


def test_they_stand_in_order_and_each_position_once():
    positions = [surface.position for surface in surfaces()]
    assert positions == sorted(set(positions))
    assert surface_names() == ("labels", "targets", "features", "maps", "inputs", "tokens", "membership")


@pytest.mark.parametrize("name", SURFACES.names())
def test_file_name_is_registry_name(name):
    assert SURFACES.entry(name).__module__ == f"dosimeter.surfaces.{name}"


@pytest.mark.parametrize("name", SURFACES.names())
def test_the_plotted_metrics_are_its_own(name):
    surface = surface_named(name)
    assert {METRICS.build(metric).surface for metric in (surface.headline, *surface.also_plotted)} == {name}


@pytest.mark.parametrize("name", SURFACES.names())
def test_every_verdict_has_its_meaning_and_none_is_reassuring(name):
    surface = surface_named(name)
    assert len({surface.meaning(verdict) for verdict in Verdict}) == len(Verdict) - 1
    assert surface.meaning(Verdict.PROVED) == surface.meaning(Verdict.LEAKED)  # what it means for the client is the same
    assert "no proof" in surface.meaning(Verdict.NOT_SHOWN)
    assert "Another setting may open" in surface.meaning(Verdict.IMPOSSIBLE)


def test_an_unknown_surface_is_refused_with_those_there_are():
    with pytest.raises(ValueError, match="there are: features, inputs, labels"):
        surface_named("weather")
