"""Pickles, looked through before they are read."""

import io
import pickle
import zipfile

import pytest

from dosimeter.files import TRUST_VARIABLE
from dosimeter.models.weight_files import read_tensors
from dosimeter.pickles import MOST_OPERATIONS, MOST_REPEATED_TUPLES, EndlessPickleError, scan_pickle


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


def test_a_pickle_of_values_without_end_is_refused_before_it_is_loaded(tmp_path, monkeypatch):
    with zipfile.ZipFile(tmp_path / "weights.pt", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", b"\x80\x02" + b"]" * 10**8 + b".")  # 100 kB, and 7 GB as lists
    with pytest.raises(ValueError, match="takes more than 1048576 operations"):
        read_tensors(tmp_path / "weights.pt")
    many = io.BytesIO(pickle.dumps(list(range(MOST_OPERATIONS))))
    with pytest.raises(EndlessPickleError, match="operations"):
        scan_pickle(many)
    monkeypatch.setenv(TRUST_VARIABLE, "1")
    many.seek(0)
    scan_pickle(many)
