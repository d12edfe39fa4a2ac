"""Finds the images that lie inside installed packages, without importing those packages and without any download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path


def packaged_file(package: str, relative: str, distribution: str) -> Path:
    """The path of a file that the wheel of `distribution` holds."""
    spec = find_spec(package)
    for root in (spec.submodule_search_locations or ()) if spec else ():
        if (path := Path(root) / relative).is_file():
            return path
    raise FileNotFoundError(f"{package}/{relative} is not on disk; it comes with the package {distribution}: install or reinstall that")
