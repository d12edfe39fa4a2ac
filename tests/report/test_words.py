import pytest

from dosimeter.registry import METRICS
from dosimeter.report.words import MEANINGS, SURFACES, higher_is_better, is_share, method_idea, metric_idea, part_idea, unit
from dosimeter.surfaces.verdicts import SURFACES as ALL_SURFACES
from dosimeter.surfaces.verdicts import Verdict


def test_every_verdict_on_every_surface_has_its_meaning():
    judged = set(Verdict) - {Verdict.NOT_MEASURED}  # a method's alone
    assert set(MEANINGS) == {(surface, verdict) for surface in ALL_SURFACES for verdict in judged}
    assert tuple(SURFACES) == ALL_SURFACES


@pytest.mark.parametrize("name", METRICS.names())
def test_direction_and_idea_come_from_the_metric_itself(name):
    entry = METRICS.entry(name)
    assert higher_is_better(name) is entry.higher_is_better  # pyright: ignore[reportFunctionMemberAccess]
    assert metric_idea(name) == (entry.__doc__ or "").split("\n")[0]


def test_what_is_not_installed_is_named_without_an_idea():
    assert method_idea("labels", "a method of tomorrow") == ""
    assert part_idea("model", "small_cnn") == ""
    assert higher_is_better("gain_of_tomorrow")
    assert not higher_is_better("error_of_tomorrow")
    assert (unit("psnr"), unit("gain_of_tomorrow")) == ("dB", "")
    assert (is_share("insacc"), is_share("label_l1"), is_share("psnr")) == (True, False, False)
