"""What decoders learn from: the features that images have in batches of one kind, and the images as they were seen."""

import pytest
import torch

from dosimeter.data.pixels import square
from dosimeter.generators.supply import Supply, _sharpen
from dosimeter.generators.target import Target
from dosimeter.types import Normalization


@pytest.fixture
def view(normed_classifier):
    return Target.from_model(normed_classifier.train(), (1, 8, 8), Normalization())


def supply_of(view, pixels, **options):
    settings = {"client_batch_sizes": (5,), "mirrored": False, "mosaics": 0.0, "sharpened": 0.0, "bfloat16": False, "seed": 0}
    return Supply(target=view, pixels=pixels, **settings | options)


def test_every_image_comes_once_with_the_features_of_its_batch(view, digits):
    images = digits[0][:30]
    (lot,) = supply_of(view, images).lots(0)
    seen = lot.images.float() / 255
    distances = torch.cdist(seen.flatten(1), images.flatten(1))
    assert sorted(distances.argmin(1).tolist()) == list(range(30))
    assert float(distances.min(1).values.max()) < 8 * 0.5 / 255
    exact = images[distances.argmin(1)]
    expected = torch.cat([view.features(batch) for batch in exact.split(5)])
    assert torch.allclose(lot.features, expected, atol=1e-6)
    features, pixels = lot.some(torch.tensor([7, 2]))
    assert torch.equal(features, lot.features[[7, 2]])
    assert torch.equal(pixels, seen[[7, 2]])


def test_another_number_gives_another_order_and_the_same_one_the_same(view, digits):
    supply = supply_of(view, digits[0][:30], mirrored=True)
    first, again, other = (next(supply.lots(number)) for number in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_mirrored_images_are_half_of_them(view, digits):
    images = digits[0][:200]
    (lot,) = supply_of(view, images, mirrored=True, client_batch_sizes=(50,)).lots(0)
    seen = (lot.images.float() / 255).flatten(1)
    straight, turned = (torch.cdist(seen, known.flatten(1)).min(1).values < 0.05 for known in (images, images.flip(-1)))
    assert bool((straight | turned).all())
    assert 70 < int(turned.sum()) < 130


def test_mosaics_are_four_images_side_by_side(view, digits):
    images = digits[0][:3]
    (lot,) = supply_of(view, images, mosaics=1.0).lots(0)
    quarters = square(images, 4)
    for drawn in lot.images.float() / 255:
        for row, column in ((0, 0), (0, 4), (4, 0), (4, 4)):
            nearest = (drawn[:, row : row + 4, column : column + 4] - quarters).abs().amax((1, 2, 3)).min()
            assert float(nearest) < 0.35  # scaling down blends neighbours at the seam
            inner = (drawn[:, row + 1 : row + 3, column + 1 : column + 3] - quarters[:, :, 1:3, 1:3]).abs().amax((1, 2, 3)).min()
            assert float(inner) < 0.05


def test_sharpening_steepens_a_ramp_and_leaves_flat_images_and_the_range_alone():
    ramp = torch.linspace(0, 1, 33).clamp(0.3, 0.7).expand(1, 3, 33, 33)
    sharp = _sharpen(ramp)
    assert float(sharp.diff(dim=-1).max()) > 2 * float(ramp.diff(dim=-1).max())
    assert float(sharp.min()) == pytest.approx(0.3)
    assert float(sharp.max()) == pytest.approx(0.7)
    flat = torch.full((1, 3, 9, 9), 0.4)
    assert torch.allclose(_sharpen(flat), flat)


def test_no_more_is_held_than_memory_allows(view, digits, monkeypatch):
    monkeypatch.setattr("dosimeter.generators.supply.HELD", 12 * (4 * 256 + 64))
    lots = list(supply_of(view, digits[0][:30]).lots(0))
    assert [len(lot.features) for lot in lots] == [12, 12, 6]
