"""Pickles, looked through before they are read."""

import io
import pickle

import pytest

from dosimeter.pickles import MOST_REPEATED_TUPLES, EndlessPickleError, scan_pickle


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_data_pass_and_the_stream_is_left_behind_them(protocol):
    content = pickle.dumps({"labels": [1, 2, 3], "data": b"pixels" * 50, "shape": (3, (2, 1))}, protocol)
    stream = io.BytesIO(content + b"rest")
    scan_pickle(stream)
    assert stream.read() == b"rest"


def test_a_place_beyond_the_pickle_is_refused():
    with pytest.raises(EndlessPickleError, match="place 2000000000, farther than it is long"):
        scan_pickle(io.BytesIO(b"]r" + (2_000_000_000).to_bytes(4, "little") + b"."))


def test_tuples_that_double_level_upon_level_are_refused():
    nested = ()
    for _ in range(2 * MOST_REPEATED_TUPLES):
        nested = (nested, nested)
    with pytest.raises(EndlessPickleError, match="repeats tuples within tuples"):
        scan_pickle(io.BytesIO(pickle.dumps(((1,), nested))))
