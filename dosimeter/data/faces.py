"""Face and non-face patches from scikit-image."""

from __future__ import annotations

import numpy as np
import torch

from dosimeter.data.bundled import packaged_file
from dosimeter.data.dataset import ImageSet, resize
from dosimeter.data.pixels import scale_pixels
from dosimeter.options import PositiveInt
from dosimeter.registry import DATASETS


@DATASETS.register("faces")
def faces(*, size: PositiveInt = 25) -> ImageSet:
    """100 faces and 100 patches without one, gray, 25×25 pixels, resized to `size`.

    G. B. Huang et al., "Labeled Faces in the Wild", 2007: the subset in scikit-image.
    """
    path = packaged_file("skimage", "data/lfw_subset.npy", "scikit-image")
    patches = np.load(path, allow_pickle=False)  # (200, 25, 25), the faces first
    images = ImageSet(
        name="faces",
        images=scale_pixels(patches[:, None], "faces"),
        labels=torch.tensor([1] * 100 + [0] * 100),
        class_names=("no face", "face"),
        origin="scikit-image's lfw_subset (Labeled Faces in the Wild)",
    )
    return resize(images, size)
