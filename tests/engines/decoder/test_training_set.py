"""What decoders learn from: the features that images have in batches of one kind, and the images as they were seen."""

import pytest
import torch

from dosimeter.data.pixels import square
from dosimeter.engines.decoder.target import Target
from dosimeter.engines.decoder.training_set import TrainingSet, _colour, _sharpen
from dosimeter.types import Normalization


@pytest.fixture
def view(normed_classifier):
    return Target.from_model(normed_classifier.train(), (1, 8, 8), Normalization())


def supply_of(view, pixels, **options):
    settings = {
        "client_batch_sizes": (5,),
        "mirrored": False,
        "mosaics": 0.0,
        "sharpened": 0.0,
        "coloured": 0.0,
        "bfloat16": False,
        "seed": 0,
    }
    return TrainingSet(target=view, pixels=pixels, **settings | options)


def test_every_image_comes_once_with_the_features_of_its_batch(view, digits):
    images = digits[0][:30]
    (batch,) = supply_of(view, images).feature_batches(0)
    seen = batch.images.float() / 255
    distances = torch.cdist(seen.flatten(1), images.flatten(1))
    assert sorted(distances.argmin(1).tolist()) == list(range(30))
    assert float(distances.min(1).values.max()) < 8 * 0.5 / 255
    exact = images[distances.argmin(1)]
    expected = torch.cat([view.features(batch) for batch in exact.split(5)])
    assert torch.allclose(batch.features, expected, atol=1e-6)
    features, pixels = batch.select(torch.tensor([7, 2]))
    assert torch.equal(features, batch.features[[7, 2]])
    assert torch.equal(pixels, seen[[7, 2]])


def test_another_number_gives_another_order_and_the_same_one_the_same(view, digits):
    training_set = supply_of(view, digits[0][:30], mirrored=True)
    first, again, other = (next(training_set.feature_batches(number)) for number in (0, 0, 1))
    assert torch.equal(first.images, again.images)
    assert not torch.equal(first.images, other.images)


def test_mirrored_images_are_half_of_them(view, digits):
    images = digits[0][:200]
    (batch,) = supply_of(view, images, mirrored=True, client_batch_sizes=(50,)).feature_batches(0)
    seen = (batch.images.float() / 255).flatten(1)
    straight, turned = (torch.cdist(seen, known.flatten(1)).min(1).values < 0.05 for known in (images, images.flip(-1)))
    assert bool((straight | turned).all())
    assert 70 < int(turned.sum()) < 130


def test_mosaics_are_four_images_side_by_side_cut_anywhere(view, digits):
    images = digits[0][:3]
    (batch,) = supply_of(view, images, mosaics=1.0).feature_batches(0)
    inner = square(images, 4)[:, :, 1:3, 1:3]  # scaling down blends neighbours at the seams
    shifts = set()
    for drawn in batch.images.float() / 255:
        fits = [(down, across) for down in range(8) for across in range(8) if _holds(drawn.roll((down, across), (1, 2)), inner)]
        assert fits
        shifts |= set(fits)
    assert len(shifts) > 1 or shifts != {(0, 0)}


def _holds(drawn, inner):
    corners = ((1, 1), (1, 5), (5, 1), (5, 5))
    return all(float((drawn[:, y : y + 2, x : x + 2] - inner).abs().amax((1, 2, 3)).min()) < 0.05 for y, x in corners)


def test_sharpening_steepens_a_ramp_and_leaves_flat_images_and_the_range_alone():
    ramp = torch.linspace(0, 1, 33).clamp(0.3, 0.7).expand(1, 3, 33, 33)
    sharp = _sharpen(ramp)
    assert float(sharp.diff(dim=-1).max()) > 2 * float(ramp.diff(dim=-1).max())
    assert float(sharp.min()) == pytest.approx(0.3)
    assert float(sharp.max()) == pytest.approx(0.7)
    flat = torch.full((1, 3, 9, 9), 0.4)
    assert torch.allclose(_sharpen(flat), flat)


def test_no_more_is_held_than_memory_allows(view, digits, monkeypatch):
    monkeypatch.setattr("dosimeter.engines.decoder.training_set.HELD", 12 * (4 * 256 + 64))
    lots = list(supply_of(view, digits[0][:30]).feature_batches(0))
    assert [len(batch.features) for batch in lots] == [12, 12, 6]


def test_colours_are_exchanged_and_their_strength_changes_but_the_gray_does_not():
    images = 0.4 + 0.2 * torch.rand(200, 3, 5, 5, generator=torch.Generator().manual_seed(3))
    drawn = _colour(images, torch.Generator().manual_seed(4))
    assert torch.allclose(drawn.mean(1), images.mean(1), atol=1e-5)  # nothing was clipped: colours stay within .4 of the gray
    gray, own = images.mean(1, keepdim=True), drawn.mean(1, keepdim=True)
    strength = (drawn - own).flatten(1).norm(dim=1) / (images - gray).flatten(1).norm(dim=1)
    assert 0 <= float(strength.min()) < 0.2
    assert 2.8 < float(strength.max()) <= 3.0001
    moved = ((drawn - own)[:, 0] / strength[:, None, None] - (images - gray)[:, 0]).abs().amax((1, 2)) > 1e-3
    assert 0.55 < float(moved.float().mean()) < 0.8  # two of three orders move the first channel


def _counted(view, monkeypatch):
    passed = []
    genuine = Target.features
    monkeypatch.setattr(
        Target, "features", lambda self, images, **options: (passed.append(len(images)), genuine(self, images, **options))[1]
    )
    return passed


@pytest.mark.parametrize("mirrored", [True, False])
def test_in_eval_mode_every_image_passes_the_target_once_each_way(normed_classifier, digits, mirrored, monkeypatch):
    frozen = Target.from_model(normed_classifier.eval(), (1, 8, 8), Normalization())
    anew, held = (supply_of(frozen, digits[0][:30], mirrored=mirrored, rounds=rounds) for rounds in (1, 30))
    passed = _counted(frozen, monkeypatch)
    expected = [batch for number in range(3) for batch in anew.feature_batches(number)] + [anew.sample()]
    assert sum(passed) == 4 * 30
    passed.clear()
    found = [batch for number in range(3) for batch in held.feature_batches(number)] + [held.sample()]
    assert sum(passed) == (60 if mirrored else 30)
    for one, other in zip(found[:3], expected[:3]):
        assert torch.equal(one.images, other.images)
        torch.testing.assert_close(one.features, other.features)
    torch.testing.assert_close(found[3], expected[3])


def test_features_are_not_held_where_batch_norm_or_variations_change_them(view, normed_classifier, digits):
    images = digits[0][:30]
    assert not supply_of(view, images, rounds=30)._repeats
    frozen = Target.from_model(normed_classifier.eval(), (1, 8, 8), Normalization())
    assert supply_of(frozen, images, rounds=30)._repeats
    for variation in ("mosaics", "sharpened", "coloured"):
        assert not supply_of(frozen, images, rounds=30, **{variation: 0.5})._repeats
