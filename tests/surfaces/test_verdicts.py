"""The verdicts as the records hold them."""

import pytest

from dosimeter.surfaces.surface import surface_names
from dosimeter.surfaces.verdicts import UTILITY, Verdict


def test_the_words_in_the_records_come_gravest_first():
    assert [str(verdict) for verdict in Verdict] == ["leaked", "not shown at this budget", "impossible here", "not measured"]


def test_a_defenses_cost_is_no_surface_and_other_words_are_no_verdict():
    assert UTILITY not in surface_names()
    with pytest.raises(ValueError, match="harmless"):
        Verdict("harmless")
