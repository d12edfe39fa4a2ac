"""Images of a bundled set by name, or of the user by path."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dosimeter.data.dataset import ImageSet, fit
from dosimeter.data.parts import Part, standard_part
from dosimeter.files import check_path
from dosimeter.options import OptionError, PositiveInt, check_value
from dosimeter.registry import DATASETS, options_of


def load_images(
    source: str | Path, *, part: Part = "all", size: int | None = None, channels: int | None = None, **options: Any
) -> ImageSet:
    """A bundled set by its name (with its options), or the images at a path; a name wins over a file of the same name.

    A set without train and test parts of its own is split as `standard_part` says.
    """
    check_value(Part, part, "part")
    check_value(PositiveInt | None, size, "size")
    check_value(str | Path, source, "data")
    check_path(source)
    if isinstance(source, str) and source in DATASETS:
        if size is not None and any(option.name == "size" for option in options_of(DATASETS.entry(source))):
            options["size"] = size
        images = fit(DATASETS.build(source, **options), size, channels)
        return standard_part(images, part)
    from dosimeter.data.readers.images import ACCEPTED, read_images  # late: a bundled set needs no reader

    if not Path(source).expanduser().exists():
        if isinstance(source, Path) or "/" in source or "\\" in source or Path(source).suffix:
            raise FileNotFoundError(f"{source}: no such file or folder; expected {ACCEPTED}, or one of: {', '.join(DATASETS)}")
        DATASETS.entry(source)
    if options:
        raise OptionError(next(iter(options)), f"goes with a bundled data set, not with the images at {source}")
    return read_images(source, part=part, size=size, channels=channels)
