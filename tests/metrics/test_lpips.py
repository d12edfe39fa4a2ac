"""LPIPS, against torchmetrics' own network filled with the same weights, and the two ways in which weights are found."""

from pathlib import Path

import pytest
import torch
from torch import nn

from dosimeter.registry import METRICS

WEIGHTS = Path(__file__).resolve().parents[3] / "shared" / "data" / "weights" / "lpips_alex_v0.1_full_fp32.pth"
needs_weights = pytest.mark.skipif(not WEIGHTS.is_file(), reason="the LPIPS weights of shared/data are not here")


@pytest.fixture(autouse=True)
def _no_weights_from_the_machine(monkeypatch, tmp_path):
    monkeypatch.delenv("DOSIMETER_LPIPS_WEIGHTS", raising=False)
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))


def alexnet_features():
    """torchvision's `alexnet().features`, as its documentation gives them."""
    convolutions = [
        nn.Conv2d(3, 64, 11, stride=4, padding=2),
        nn.Conv2d(64, 192, 5, padding=2),
        nn.Conv2d(192, 384, 3, padding=1),
        nn.Conv2d(384, 256, 3, padding=1),
        nn.Conv2d(256, 256, 3, padding=1),
    ]
    layers = []
    for index, convolution in enumerate(convolutions):
        layers += [convolution, nn.ReLU()] + [nn.MaxPool2d(3, 2)] * (index in (0, 1, 4))
    weights = torch.load(WEIGHTS, weights_only=True)
    for index, convolution in enumerate(convolutions):
        convolution.load_state_dict({part: weights[f"conv{index}.{part}"] for part in ("weight", "bias")})
    return nn.Sequential(*layers)


def photographs(side):
    from skimage.data import astronaut, chelsea

    images = torch.stack([torch.from_numpy(picture()[60 : 60 + side, 120 : 120 + side].copy()) for picture in (astronaut, chelsea)])
    return images.permute(0, 3, 1, 2) / 255


@needs_weights
@pytest.mark.parametrize("side", [31, 64])
def test_is_torchmetrics_value_on_real_images(monkeypatch, side):
    from torchmetrics.functional.image import lpips

    monkeypatch.setattr(lpips, "_get_tv_model_features", lambda net, pretrained: alexnet_features())
    truth = photographs(side)
    recovered = torch.stack(
        [truth[1], (truth[1] + 0.1 * torch.randn(3, side, side, generator=torch.Generator().manual_seed(4))).clamp(0, 1)]
    )
    with torch.no_grad():
        expected = lpips._LPIPS(net="alex").eval()(recovered, truth, normalize=True).flatten()
    values = METRICS.build("lpips", weights=str(WEIGHTS))(recovered, truth)
    assert values.tolist() == pytest.approx(expected.tolist(), rel=1e-3)
    assert float(values[0]) > 0.3


@needs_weights
def test_identical_images_have_distance_zero_and_noise_moves_them_apart(monkeypatch):
    monkeypatch.setenv("DOSIMETER_LPIPS_WEIGHTS", str(WEIGHTS))
    truth = photographs(48)[:1].repeat(6, 1, 1, 1)
    noise = torch.randn(1, 3, 48, 48, generator=torch.Generator().manual_seed(8))
    recovered = truth + torch.tensor([0.0, 0.01, 0.03, 0.1, 0.3, 1.0]).reshape(6, 1, 1, 1) * noise
    values = METRICS.build("lpips")(recovered, truth)
    assert float(values[0]) == 0
    assert bool((values.diff() > 0).all())


@needs_weights
def test_gray_images_count_as_three_equal_channels_and_pieces_keep_their_order():
    metric = METRICS.build("lpips", weights=str(WEIGHTS))
    truth = photographs(32).mean(1, keepdim=True)
    assert metric(truth.flip(0), truth).tolist() == pytest.approx(
        metric(truth.flip(0).repeat(1, 3, 1, 1), truth.repeat(1, 3, 1, 1)).tolist()
    )
    many = truth[:1].repeat(70, 1, 1, 1)
    changed = many.clone()
    changed[66] = truth[1]
    assert metric(changed, many).nonzero().flatten().tolist() == [66]


@needs_weights
def test_takes_torchvisions_backbone_with_torchmetrics_linear_layers(tmp_path):
    checkpoint = tmp_path / "hub" / "checkpoints" / "alexnet-owt-7be5be79.pth"
    checkpoint.parent.mkdir(parents=True)
    torch.save({f"features.{name}": weight for name, weight in alexnet_features().state_dict().items()}, checkpoint)
    truth = photographs(40)
    expected = METRICS.build("lpips", weights=str(WEIGHTS))(truth.flip(0), truth)
    assert METRICS.build("lpips")(truth.flip(0), truth).tolist() == pytest.approx(expected.tolist(), rel=1e-4)


@needs_weights
def test_says_which_images_it_cannot_take():
    metric = METRICS.build("lpips", weights=str(WEIGHTS))
    assert metric.unavailable((3, 31, 31)) is None
    assert "at least 31×31 pixels" in metric.unavailable((1, 8, 8))
    assert "(4, 64, 64)" in metric.unavailable((4, 64, 64))


def test_without_weights_it_is_unavailable_and_never_faked(tmp_path):
    metric = METRICS.build("lpips")
    assert "DOSIMETER_LPIPS_WEIGHTS" in metric.unavailable()
    with pytest.raises(ValueError, match="lpips: no weights here"):
        metric(torch.zeros(1, 3, 32, 32), torch.zeros(1, 3, 32, 32))
    assert "no such file" in METRICS.build("lpips", weights=str(tmp_path / "no.pth")).unavailable()
    (tmp_path / "text.pth").write_text("not tensors")
    assert METRICS.build("lpips", weights=str(tmp_path / "text.pth")).unavailable().endswith("a file of tensors")
    torch.save({"conv0.weight": torch.zeros(1)}, tmp_path / "other.pth")
    assert METRICS.build("lpips", weights=str(tmp_path / "other.pth")).unavailable().endswith("conv0.bias is missing")
