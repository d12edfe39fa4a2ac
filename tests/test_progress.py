"""Progress reaches the listener of the innermost block, and nobody outside."""

from contextlib import suppress

from dosimeter.progress import advance, listening


def test_the_innermost_listener_hears_and_the_outer_one_comes_back():
    outer, inner = [], []
    advance(0, 9)  # nobody listens
    with listening(lambda *heard: outer.append(heard)):
        advance(1, 9, "first")
        with suppress(KeyError), listening(lambda *heard: inner.append(heard)):
            advance(2, 9)
            raise KeyError
        with listening(None):
            advance(3, 9)
        advance(4, 9)
    advance(5, 9)
    assert outer == [(1, 9, "first"), (4, 9, "")]
    assert inner == [(2, 9, "")]
