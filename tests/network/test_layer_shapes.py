"""Which layers can show their inputs, and up to which batch: numbers from shapes alone."""

from torch import nn

from dosimeter.network.layer_shapes import largest_batch
from dosimeter.registry import MODELS


def test_the_limits_of_a_residual_net_follow_from_its_shapes():
    limits = {one.layer: one for one in largest_batch(MODELS.build("resnet18", classes=10, size=32), (3, 32, 32))}
    assert limits["layer4.0.conv2"].limit == limits["layer4.1.conv1"].limit == 512 // 16
    assert limits["layer3.1.conv2"].limit == 256 // 64
    assert limits["layer1.0.conv1"].limit == 0
    assert "32 x 32 positions" in limits["layer1.0.conv1"].reason
    assert limits["layer4.0.conv1"].limit == 0
    assert "stride" in limits["layer4.0.conv1"].reason
    assert "fc" not in limits


def test_each_kind_of_layer_says_why_it_shows_nothing():
    model = nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=2, dilation=2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="circular"),
        nn.ReLU(),
        nn.Conv2d(8, 8, 1),
        nn.ReLU(),
        nn.Conv2d(8, 8, 2),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(8, 20),
        nn.GELU(),
        nn.Linear(20, 20),
        nn.ReLU(),
        nn.Linear(20, 20),
        nn.ReLU(),
        nn.Linear(20, 10),
    )
    limits = {one.layer: (one.limit, one.reason) for one in largest_batch(model, (1, 4, 4))}
    for layer, word in (
        ("2", "8 groups"),
        ("4", "dilated"),
        ("6", "circular padding"),
        ("8", "1 by 1"),
        ("10", "4 x 4 positions"),
        ("12", "3 x 3 positions"),
    ):
        assert limits[layer][0] == 0
        assert word in limits[layer][1]
    assert limits["15"][0] == 8
    assert limits["17"][0] == 20
    assert "head's proved samples" in limits["17"][1]
    assert limits["19"][0] == 20
    assert "21" not in limits


def test_one_side_with_room_is_enough():
    """32 positions of two samples fit the 40 outputs of the second layer, and its 20 inputs say enough of them."""
    model = nn.Sequential(
        nn.Conv2d(1, 20, 3, padding=1), nn.ReLU(), nn.Conv2d(20, 40, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(640, 10)
    )
    limit = largest_batch(model, (1, 4, 4))[1]
    assert limit.limit == 2
    assert "4 x 4 output positions a sample, 40 output channels" in limit.reason


def test_a_kernel_along_one_axis_says_which_positions_stay_mixed():
    stem, flat = nn.Conv2d(3, 64, 3, padding=1), nn.Conv2d(64, 64, (1, 3), padding=(0, 1))
    model = nn.Sequential(stem, nn.ReLU(), flat, nn.Flatten(), nn.Linear(1024, 5))
    limits = {one.layer: one for one in largest_batch(model, (3, 4, 4))}
    assert limits["2"].limit == 0
    assert limits["2"].reason == "a kernel of 1 by 3 moves nothing along its short side, where positions stay mixed"
