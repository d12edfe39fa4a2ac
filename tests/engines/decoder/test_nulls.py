"""What an attack draws without the gradient is scored beside it, matched as it is, and can take its verdict away."""

import torch

import dosimeter as dm
from dosimeter.surfaces.inputs import judge_inputs
from dosimeter.surfaces.verdicts import Verdict


def test_an_attacks_own_nulls_are_matched_and_counted(digits):
    images, labels = digits
    truth = dm.Batch(images[:3], labels[:3])
    found = dm.Reconstruction(inputs=images[:3] + 0.01, labels=labels[:3], objective=0.0)
    foreign = dm.Reconstruction(inputs=images[40:43], labels=labels[:3], objective=0.0)
    leaked = dm.score(found, truth, metrics=("psnr",), foreign=foreign)
    told = dm.Reconstruction(inputs=found.inputs, labels=found.labels, objective=0.0, nulls={"mean feature": images[:3].flip(0) + 0.01})
    scores = dm.score(told, truth, metrics=("psnr",), foreign=foreign)
    assert torch.allclose(scores.nulls["mean feature"]["psnr"], torch.full((3,), 40.0, dtype=torch.float64), atol=1e-3)
    assert torch.equal(scores["psnr"], leaked["psnr"])

    def verdict(result):
        nulls = {name: {"psnr": null["psnr"].tolist()} for name, null in result.nulls.items()}
        return judge_inputs({"psnr": result["psnr"].tolist()}, nulls, chance=result.details["chance"])[0]

    assert verdict(leaked) is Verdict.LEAKED
    assert verdict(scores) is Verdict.NOT_SHOWN


def test_private_images_in_the_auxiliary_data_are_reported(digits):
    images, labels = digits
    found = dm.Reconstruction(inputs=images[:4], labels=labels[:4], objective=0.0)
    auxiliary = dm.Batch(images[2:20], labels[2:20])
    scores = dm.score(found, dm.Batch(images[:4], labels[:4]), auxiliary=auxiliary, metrics=("psnr",))
    assert "2 of 4 private samples are in the auxiliary data too" in scores.warnings[0]
