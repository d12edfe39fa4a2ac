"""Pictures of a record: PNGs of the pixels, in the truth's order, with the nulls that there are."""

import base64
import io

import numpy as np
import torch
from PIL import Image

import dosimeter as dm
from dosimeter.surfaces.pictures import MOST_PICTURES, picture_rows, png


def pixels_of(text: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(text))))


def test_a_png_holds_the_rounded_pixels_and_draws_what_is_not_finite_as_black():
    gray = torch.tensor([[[0.0, 0.5, 2.0], [-1.0, 1.0, torch.nan]]])
    assert pixels_of(png(gray)).tolist() == [[0, 128, 255], [0, 255, 0]]
    color = torch.zeros(3, 2, 2)
    color[1] = 1
    assert pixels_of(png(color))[0, 0].tolist() == [0, 255, 0]
    assert png(None) is None


def test_rows_follow_the_truth_and_leave_out_what_is_missing(digits):
    truth, known = dm.Batch(digits.inputs[:3], digits.targets[:3]), dm.Batch(digits.inputs[50:90], digits.targets[50:90])
    found = dm.Reconstruction(inputs=truth.inputs[[2, 0]], labels=truth.targets[[2, 0]], objective=0.0)
    rows = picture_rows(found, truth, None, known, dm.score(found, truth, auxiliary=known))
    assert [row["recovered"] is None for row in rows] == [False, True, False]
    assert rows[0]["recovered"] == rows[0]["truth"] == png(truth.inputs[0])
    nearest = torch.cdist(truth.inputs.flatten(1), known.inputs.flatten(1)).argmin(1)
    assert [row["nulls"] for row in rows] == [{"nearest": png(known.inputs[i])} for i in nearest]
    foreign = dm.Reconstruction(inputs=known.inputs[:1], labels=known.targets[:1], objective=0.0)
    assert sum("foreign" in row["nulls"] for row in picture_rows(found, truth, foreign, None, dm.score(found, truth))) == 1


def test_a_record_holds_so_many_pictures_and_no_more(digits):
    many = dm.Batch(digits.inputs[: MOST_PICTURES + 4], digits.targets[: MOST_PICTURES + 4])
    found = dm.Reconstruction(inputs=many.inputs, labels=many.targets, objective=0.0)
    assert len(picture_rows(found, many, None, None, dm.score(found, many))) == MOST_PICTURES
