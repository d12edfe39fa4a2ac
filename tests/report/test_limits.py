"""The figure of limits and its sentence."""

import pytest

from dosimeter.report.limits import ceiling_text, limits_plot, limits_sentence
from dosimeter.surfaces.limits import Limits

TOKENS = {"surface": "tokens", "metric": "token_f1", "ceiling": [1.0], "bound": ""}


def limits(**changes):
    usual = {"surface": "inputs", "metric": "psnr", "proved": [None, None], "shown": [12.0, 14.0], "ceiling": [22.0, 18.0]}
    return Limits(**usual | {"method": "dlg", "bound": "van_trees", "theorem": False} | changes)


def test_more_leaked_stands_higher_and_equal_values_stand_together():
    plot = limits_plot(limits(proved=[None, 14.0]))
    for column in plot.columns:
        assert column.ceiling < column.shown  # pixels from the top
    assert plot.columns[1].proved == plot.columns[1].shown
    assert plot.columns[0].proved is None
    errors = limits_plot(limits(metric="feature_error", shown=[0.5, 1e-6], ceiling=[0.0, 0.0], bound=""))
    assert errors.columns[0].shown > errors.columns[1].shown > errors.columns[1].ceiling == 0


def test_a_huge_ceiling_does_not_squeeze_the_rest():
    plot = limits_plot(limits(ceiling=[161.0, 160.0]))
    assert plot.columns[0].ceiling == 0
    assert any(text.startswith("≥60") for text in (tick.text for tick in plot.ticks))
    assert "nothing is known that stops a better attack" in plot.sentence


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "A better attack may gain"),
        ({"shown": [21.8, 17.9]}, "Nothing is left to find, within 1"),
        ({"proved": [12.0, 14.0]}, "Nothing is left to find: each of 2 values is proved"),
        (TOKENS | {"proved": [1.0], "shown": [1.0]}, "in the set of tokens: all of it"),
        (TOKENS | {"proved": [0.9], "shown": [0.9]}, "the rest leaves no trace"),
        ({"metric": "insacc", "shown": [1.0], "proved": [None], "ceiling": [0.998]}, "Nothing is left to find: dlg reaches"),
        ({"metric": "insacc", "shown": [1.0], "proved": [None], "ceiling": [0.9]}, "about which one batch scatters"),
        ({"shown": [25.0, 25.0]}, "these samples are easier"),
        ({"shown": [None, None]}, "Nothing came back"),
        ({"ceiling": [None, None], "bound": "", "refusals": ("needs noise",)}, "No ceiling is known here: needs noise."),
        ({"metric": "insacc", "shown": [0.5], "proved": [None], "ceiling": [1.0], "bound": ""}, "no bound below exact recovery is known"),
    ],
)
def test_the_sentence_says_whether_the_question_is_closed(changes, said):
    assert said in limits_sentence(limits(**changes))


def test_the_ceiling_of_a_cell_in_words():
    assert [ceiling_text(value) for value in (None, 80.0, 14.25)] == ["none known", "≥60\u202fdB", "14.2\u202fdB"]


def test_the_sentence_sets_attack_bound_and_epsilon_side_by_side():
    facts = {"chance": 0.1, "high": 0.728, "attack": 0.539, "steps": 3, "epsilon": {"rdp": 9.01, "prv": 8.4}, "delta": 1e-5}
    said = limits_plot(limits(identification=facts)).sentence
    assert "picks it in 54 % of the cases, and none can in more than 73 %, over 3 rounds" in said.replace("\u202f", " ")
    assert "9.01 (rdp) and 8.40 (prv)" in said
    assert "candidates" not in limits_plot(limits()).sentence
    assert "picks it in at most" in limits_plot(limits(identification={"chance": 0.1, "high": 0.728})).sentence
