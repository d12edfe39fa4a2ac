"""Handwritten digits from scikit-learn."""

from __future__ import annotations

import numpy as np
import torch

from dosimeter.data.bundled import packaged_file
from dosimeter.data.dataset import ImageSet, resize
from dosimeter.data.pixels import scale_pixels
from dosimeter.options import PositiveInt
from dosimeter.registry import DATASETS


@DATASETS.register("digits")
def digits(*, size: PositiveInt = 8) -> ImageSet:
    """1,797 handwritten digits, gray, 8×8 pixels, enlarged to `size`.

    E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning Repository, 1998; as in scikit-learn.
    """
    path = packaged_file("sklearn", "datasets/data/digits.csv.gz", "scikit-learn")
    table = np.loadtxt(path, delimiter=",")  # (1797, 65): 64 pixels in 0..16, then the digit
    images = ImageSet(
        name="digits",
        images=scale_pixels(table[:, :64].reshape(-1, 1, 8, 8) / 16, "digits"),
        labels=torch.from_numpy(table[:, 64].astype(np.int64)),
        class_names=tuple("0123456789"),
        origin="scikit-learn's digits (UCI Optical Recognition of Handwritten Digits)",
    )
    return resize(images, size)
