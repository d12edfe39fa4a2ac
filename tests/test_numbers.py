import pytest

from dosimeter.numbers import duration, percent, plain, power_of_ten, significant, times


@pytest.mark.parametrize("value", [1.0, 9.99, 123.0, 0.001, 0.0102, 54321.0, -2.5e-7, 8e9])
def test_three_digits_stay_within_rounding_of_the_value(value):
    text = significant(value).replace("−", "-")
    digits, _, power = text.partition("×10")
    exponent = int(power.translate(str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")) or 0)
    assert float(digits) * 10.0**exponent == pytest.approx(value, rel=0.05)


def test_powers_of_ten():
    assert [power_of_ten(power) for power in (-6, -2, 0, 1, 5)] == ["10⁻⁶", "0.01", "1", "10", "10⁵"]


@pytest.mark.parametrize(("seconds", "text"), [(0.021, "0.02 s"), (21.44, "21.4 s"), (125.0, "2 min 05 s")])
def test_duration(seconds, text):
    assert duration(seconds).replace("\u202f", " ") == text


def test_shares_and_ratios_carry_their_sign_and_a_dash_where_there_is_none():
    assert (percent(0.667), percent(None)) == ("67\u202f%", "–")
    assert (times(1.5), times(None)) == ("1.50\u202f×", "–")
    assert plain(-1.25, 1) == "−1.2"
