import pytest

from dosimeter.registry import METRICS
from dosimeter.report.words import higher_is_better, is_share, method_idea, metric_idea, metric_name, null_name, part_idea, unit


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
    assert (metric_name("psnr"), metric_name("gain_of_tomorrow")) == ("PSNR", "gain of tomorrow")
    assert (null_name("prior"), null_name("null_of_tomorrow")) == ("guessing", "null of tomorrow")
    assert (is_share("insacc"), is_share("label_l1"), is_share("psnr")) == (True, False, False)
