"""Pickles of strangers, looked through before an unpickler sees them.

An unpickler that imports nothing still trusts a pickle in three ways. It makes room for as many values as the pickle names. It hashes
tuples that hold one tuple many times over, level upon level, which has no end. And it makes a value of each byte, where a few packed
bytes unpack to a pickle of megabytes.
"""

from __future__ import annotations

import pickletools
from typing import IO

from dosimeter.files import remedy, trusts_files

MOST_REPEATED_TUPLES = 16  # uses of a tuple that was used before; each may double what a key holds
MOST_OPERATIONS = 2**20  # a state dict takes some 30 a tensor, the labels and names of CIFAR-100 some 200,000
STORING, FETCHING = {"PUT", "BINPUT", "LONG_BINPUT"}, {"GET", "BINGET", "LONG_BINGET"}


class EndlessPickleError(ValueError):
    """A pickle of a few bytes that takes memory or time without end."""


def scan_pickle(stream: IO[bytes]) -> None:
    """Refuse a pickle that names places beyond its own length, repeats tuples or makes values without end. The stream is left behind it."""
    tuples: set[int] = set()
    repeated, stored, made = 0, 0, ""
    for position, (opcode, argument, _) in enumerate(pickletools.genops(stream)):
        if position >= MOST_OPERATIONS and not trusts_files():
            raise EndlessPickleError(f"it takes more than {MOST_OPERATIONS} operations; {remedy()}")
        name = opcode.name
        place = int(argument or 0) if name in STORING | FETCHING else stored
        if not 0 <= place <= stream.tell():
            raise EndlessPickleError(f"it stores a value at place {place}, farther than it is long")
        if name in STORING or name == "MEMOIZE":
            stored += 1
            if "TUPLE" in made:
                tuples.add(place)
        repeated += name == "DUP" or (name in FETCHING and place in tuples)
        if repeated > MOST_REPEATED_TUPLES:
            raise EndlessPickleError("it repeats tuples within tuples")
        made = name
