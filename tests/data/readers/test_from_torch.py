from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from dosimeter.data.readers.from_torch import from_torch

PIXELS = torch.randint(0, 256, (6, 3, 5, 5), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
LABELS = torch.tensor([2, 0, 1, 1, 0, 2])


class MapStyle(Dataset):
    """Knows its length and wraps around: iteration that waits for an IndexError would never end."""

    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> tuple[Image.Image, int]:
        return Image.fromarray(PIXELS[index % 6].permute(1, 2, 0).numpy()), int(LABELS[index % 6])


class Stream(IterableDataset):
    def __iter__(self):
        yield from ((image.double() / 255, np.int64(label)) for image, label in zip(PIXELS, LABELS.tolist()))


@pytest.mark.parametrize(
    "dataset",
    [
        TensorDataset(PIXELS, LABELS),
        TensorDataset(PIXELS / 255, LABELS),
        MapStyle(),
        Stream(),
        [(image.numpy(), label) for image, label in zip(PIXELS, LABELS)],
        Subset(TensorDataset(PIXELS, LABELS), range(6)),
    ],
    ids=["bytes", "floats", "Pillow", "stream", "list of arrays", "subset"],
)
def test_every_kind_gives_the_same_images(dataset) -> None:
    found = from_torch(dataset)
    assert torch.equal((found.images * 255).round().byte(), PIXELS)
    assert found.labels.tolist() == LABELS.tolist()
    assert found.class_names == (("a", "b", "c") if isinstance(dataset, MapStyle) else ("0", "1", "2"))


def test_options() -> None:
    found = from_torch(TensorDataset(PIXELS[:, 0], LABELS), name="mine", size=3, class_names=["x", "y", "z", "w"])
    assert (found.name, found.class_names, found.images.shape) == ("mine", ("x", "y", "z", "w"), (6, 1, 3, 3))


@pytest.mark.parametrize(
    ("dataset", "kind", "message"),
    [
        ([], ValueError, "list: expected at least one"),
        ([PIXELS[0]], TypeError, r"list\[0\]: expected a pair \(image, label\), got Tensor"),
        ([(PIXELS[0], 1), (PIXELS[0],)], TypeError, r"list\[1\]: expected a pair"),
        ([("cat.png", 1)], TypeError, r"list\[0\]: expected a tensor, an array or a Pillow image, got str"),
        ([(PIXELS, LABELS)], ValueError, r"list\[0\]: expected one image .* got shape \(6, 3, 5, 5\)"),
        ([(PIXELS[0] / 255 - 0.5, 1)], ValueError, r"list\[0\]: expected pixels as floats in \[0, 1\], before any normalisation"),
        ([(PIXELS[0], 0.5)], ValueError, r"list\[0\]: expected a class id"),
        ([(PIXELS[0], -1)], ValueError, r"list\[0\]: expected a class id"),
        ([(PIXELS[0], torch.tensor([0.5, 0.5]))], ValueError, r"list\[0\]: expected a class id"),
        ([(PIXELS[0], 0), (PIXELS[0, :, :4], 0)], ValueError, "differ in shape"),
    ],
)
def test_what_does_not_fit(dataset, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        from_torch(dataset)
