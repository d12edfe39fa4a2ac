"""Evidence of a record: PNGs of the pixels, in the truth's order, with the nulls that there are."""

import base64
import io

import numpy as np
import torch
from PIL import Image

import dosimeter as dm
from dosimeter.surfaces.labels import MOST_CLASSES, Labels
from dosimeter.surfaces.pictures import MOST_PICTURES, TRACK_WIDTH, are_series, curves, png, show_inputs, strips
from dosimeter.surfaces.scores import Comparison


def pixels_of(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_a_png_holds_the_rounded_pixels_and_draws_what_is_not_finite_as_black():
    gray = torch.tensor([[[0.0, 0.5, 2.0], [-1.0, 1.0, torch.nan]]])
    assert pixels_of(png(gray)).tolist() == [[0, 128, 255], [0, 255, 0]]
    color = torch.zeros(3, 2, 2)
    color[1] = 1
    assert pixels_of(png(color))[0, 0].tolist() == [0, 255, 0]
    assert png(None) is None


def test_evidence_follows_the_truth_and_leaves_out_what_is_missing(digits):
    truth, known = dm.Batch(digits.inputs[:3], digits.targets[:3]), dm.Batch(digits.inputs[50:90], digits.targets[50:90])
    found = dm.Reconstruction(inputs=truth.inputs[[2, 0]], labels=truth.targets[[2, 0]], objective=0.0)
    shown = show_inputs(found, Comparison(truth=truth, auxiliary=known), dm.score(found, truth, auxiliary=known))
    assert [one.recovered is None for one in shown] == [False, True, False]
    assert [one.score is None for one in shown] == [False, True, False]
    assert shown[0].recovered == shown[0].private == png(truth.inputs[0])
    nearest = torch.cdist(truth.inputs.flatten(1), known.inputs.flatten(1)).argmin(1)
    assert [one.nulls for one in shown] == [{"nearest": png(known.inputs[i])} for i in nearest]
    foreign = dm.Reconstruction(inputs=known.inputs[:1], labels=known.targets[:1], objective=0.0)
    shown = show_inputs(found, Comparison(truth=truth, foreign=foreign), dm.score(found, truth))
    assert sum("foreign" in one.nulls for one in shown) == 1


def test_a_record_holds_so_many_pictures_and_no_more(digits):
    many = dm.Batch(digits.inputs[: MOST_PICTURES + 4], digits.targets[: MOST_PICTURES + 4])
    found = dm.Reconstruction(inputs=many.inputs, labels=many.targets, objective=0.0)
    assert len(show_inputs(found, Comparison(truth=many), dm.score(found, many))) == MOST_PICTURES


def test_without_the_truth_the_evidence_is_what_was_recovered_alone(digits):
    found = dm.Reconstruction(inputs=digits.inputs[:2], labels=digits.targets[:2], objective=0.0)
    shown = show_inputs(found, None, None)
    assert [(one.private, one.nulls, one.score) for one in shown] == [(None, {}, None)] * 2
    assert shown[1].recovered == png(digits.inputs[1])
    labels = dm.LabelEstimate(counts=torch.tensor([0, 2, 1]), labels=torch.tensor([1, 1, 2]))
    (one,) = Labels().evidence(labels)
    assert (one.kind, one.private, one.recovered) == ("table", None, {"class 1": "2", "class 2": "1"})


def test_labels_are_a_table_of_true_against_recovered_counts():
    labels = dm.LabelEstimate(counts=torch.tensor([0, 2, 1, 0]), labels=torch.tensor([1, 1, 2]))
    truth = dm.Batch(torch.zeros(3, 1), torch.tensor([1, 1, 3]))
    (one,) = Labels().evidence(labels, Comparison(truth=truth), None)
    assert one.private == {"class 1": "2", "class 2": "0", "class 3": "1"}
    assert one.recovered == {"class 1": "2", "class 2": "1", "class 3": "0"}
    soft = dm.Batch(torch.zeros(3, 1), torch.eye(4)[truth.targets])
    assert Labels().evidence(labels, Comparison(truth=soft), None) == [one]
    many = dm.LabelEstimate(counts=torch.ones(30, dtype=torch.int64), labels=torch.arange(30))
    (one,) = Labels().evidence(many)
    assert len(one.recovered) == MOST_CLASSES
    assert one.caption.endswith(f"and {30 - MOST_CLASSES} more classes")


def test_strips_of_vectors_share_one_scale_of_grays():
    one, other, missing = strips([torch.tensor([0.0, 1.0, 2.0, 3.0, 4.0]), torch.tensor([4.0, 4.0, 0.0, 0.0, 0.0]), None])
    assert missing is None
    assert pixels_of(one).flatten().tolist() == [0, 64, 128, 191, 255, 255, 255, 255]  # five entries, the rest white
    assert pixels_of(other).flatten().tolist()[:5] == [255, 255, 0, 0, 0]


def test_a_signal_is_drawn_as_curves_one_track_a_channel_on_one_scale():
    times = torch.linspace(0, 1, 64)
    rising = torch.stack([times, 1 - times])  # (2, 64)
    drawn = pixels_of(curves(rising, 0.0, 1.0))
    assert drawn.shape == (96, TRACK_WIDTH)
    ink = [(drawn[:, column] == 0).nonzero()[0] for column in (1, TRACK_WIDTH - 2)]
    upper, lower = [place[place < 48].mean() for place in ink], [place[place >= 48].mean() for place in ink]
    assert upper[0] > 40 > 8 > upper[1]  # the first channel rises
    assert lower[0] < 56 < 88 < lower[1]
    flat = pixels_of(curves(torch.full((1, 64), 0.5), 0.0, 1.0))
    assert abs((flat == 0).nonzero()[0].mean() - 48) < 2
    assert pixels_of(curves(torch.full((1, 64), torch.nan), 0.0, 1.0)).shape == (96, TRACK_WIDTH)


def test_signals_are_shown_as_curves_and_rows_as_tables():
    assert [are_series(shape) for shape in ((1, 100), (12, 1000), (64,), (3, 8, 8), (10, 12))] == [True, True, False, False, False]
    inputs = torch.rand(2, 1, 40)
    found = dm.Reconstruction(inputs=inputs, labels=torch.zeros(2, dtype=torch.int64), objective=0.0)
    truth = dm.Batch(inputs, torch.zeros(2, dtype=torch.int64))
    shown = show_inputs(found, Comparison(truth=truth), dm.score(found, truth))
    assert [one.kind for one in shown] == ["image", "image"]
    assert shown[0].private == shown[0].recovered
    assert pixels_of(shown[0].private).shape == (96, TRACK_WIDTH)
