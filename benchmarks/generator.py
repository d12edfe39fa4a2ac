"""How fast a decoder trains, and how long RGLA takes on 256 images of 224 pixels, with exact features and as published.

    python benchmarks/generator.py --parts training attack recovery --backbone resnet50_keras.safetensors --device cuda

Every ratio is measured in one run on one machine. Images are random: the times depend on the sizes alone. `attack` needs labels to
be recovered as well, which `subspace` does on its way; `published_steps` of the paper's 20,000 can be cut, the time is then scaled.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

import dosimeter as dm
from dosimeter.engines.decoder.cache import train_or_load
from dosimeter.engines.decoder.losses import squared_error
from dosimeter.engines.decoder.network import Decoder, Shape
from dosimeter.engines.decoder.settings import DecoderSettings
from dosimeter.engines.decoder.target import Target
from dosimeter.models.backbone import load_backbone
from dosimeter.models.loading import load_model
from dosimeter.randomness import generator
from dosimeter.types import Normalization


def target(backbone: Path, *, classes: int = 1000, size: int = 224, seed: int = 0) -> nn.Module:
    """RGLA's network: ResNet-50 without pooling, its head drawn from `seed`, in train mode."""
    options = {"classes": classes, "size": size, "stem": "imagenet", "pooling": False, "variant": "keras"}
    model = load_model("resnet50", options, None, seed)
    load_backbone(model, backbone, head="fc")
    return model.train()


def seconds(function, device: torch.device) -> tuple[float, object]:
    _wait(device)
    began = time.perf_counter()
    result = function()
    _wait(device)
    return time.perf_counter() - began, result


def training(options: argparse.Namespace, model: nn.Module, view: Target) -> None:
    """Images a second: the target's features, and a step of the decoder, eager and compiled."""
    device = view.device
    images = torch.rand(256, *view.image_shape, generator=generator(0, "images", device), device=device)
    if device.type == "cuda":
        view.model.to(memory_format=torch.channels_last)
        images = images.contiguous(memory_format=torch.channels_last)
    bfloat16 = device.type == "cuda"
    for size in (len(images), 8):
        for _ in range(2):
            took, features = seconds(partial(view.features_in_batches, images, size, bfloat16=bfloat16), device)
        print(f"features, batches of {size}: {len(images) / took:.0f} images/s", flush=True)
    for width in options.widths:
        for compiled in (False, True) if device.type == "cuda" else (False,):
            shape = Shape(feature=view.feature_shape, image=view.image_shape, width=width, finest=options.finest)
            _decoder_speed(shape, features, images, compiled, options.steps)


def _decoder_speed(shape: Shape, features: Tensor, images: Tensor, compiled: bool, steps: int) -> None:
    device = images.device
    decoder = Decoder(shape).to(device)
    if device.type == "cuda":
        decoder = decoder.to(memory_format=torch.channels_last)
    optimizer = torch.optim.Adam(decoder.parameters(), fused=device.type == "cuda")

    def loss(f: Tensor, x: Tensor) -> Tensor:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            drawn = decoder(f)
        return squared_error(drawn.float(), x)

    step_loss = torch.compile(loss) if compiled else loss

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        step_loss(features[:128], images[:128]).backward()
        optimizer.step()

    first, _ = seconds(step, device)
    seconds(step, device)
    took, _ = seconds(lambda: [step() for _ in range(steps)], device)
    parameters = sum(p.numel() for p in decoder.parameters())
    form = "compiled" if compiled else "eager"
    print(
        f"decoder {shape.width} {form}: {128 * steps / took:.0f} images/s, first step {first:.1f} s, {parameters / 1e6:.1f} M", flush=True
    )


def recovery(options: argparse.Namespace, model: nn.Module, view: Target) -> None:
    """Features alone, from plain and from defended gradients."""
    for size in options.batch_sizes:
        batch = _batch(view, size, options.classes)
        for defense in (None, dm.defense("pruning", ratio=0.999), dm.defense("gaussian_noise", std=0.01)):
            exposure = dm.observe(model, batch, defenses=() if defense is None else (defense,))
            for given in (True, False):
                labels = batch.targets if given else None
                took, found = seconds(partial(dm.recover_features, exposure, "subspace", labels=labels), view.device)
                name = "plain" if defense is None else defense.name
                certified = int(found.certified.sum())
                print(
                    f"recovery B={size} {name}, labels {'given' if given else 'unknown'}: {took:.2f} s, {certified} certified", flush=True
                )


def attack(options: argparse.Namespace, model: nn.Module, view: Target) -> None:
    """The whole attack, decoder trained; once to warm up, then timed."""
    settings = DecoderSettings(width=options.widths[0], finest=options.finest, epochs=1, batch_size=32)
    pixels = torch.rand(64, *view.image_shape, generator=generator(0, "auxiliary"))
    decoder = train_or_load(view, pixels.to(view.device), settings, options.out / "bench-decoder.safetensors")
    auxiliary = dm.Batch(pixels.to(view.device), torch.zeros(64, dtype=torch.int64, device=view.device))
    for size in options.batch_sizes:
        batch = _batch(view, size, options.classes)
        exposure = dm.observe(model, batch, auxiliary=auxiliary)

        common = {"decoder": str(decoder.path)}
        ours = partial(dm.reconstruct, exposure, "rgla", features="subspace", **common)
        published = partial(dm.reconstruct, exposure, "rgla", labels=batch.targets, steps=options.published_steps, **common)
        warm_up, _ = seconds(ours, view.device)
        took, _ = seconds(ours, view.device)
        theirs, _ = seconds(published, view.device)
        theirs *= 20_000 / options.published_steps
        print(f"attack B={size}: {took:.2f} s (first {warm_up:.2f} s), as published {theirs:.1f} s, ratio {theirs / took:.1f}", flush=True)


def _batch(view: Target, size: int, classes: int) -> dm.Batch:
    rng = generator(1, f"batch {size}")
    images = torch.nn.functional.interpolate(torch.rand(size, 3, 16, 16, generator=rng), view.image_shape[1:], mode="bicubic").clamp(0, 1)
    return dm.Batch(images.to(view.device), torch.randint(classes, (size,), generator=rng).to(view.device))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


PARTS = {"training": training, "recovery": recovery, "attack": attack}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--backbone", type=Path, required=True)
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[8, 256])
    parser.add_argument("--widths", nargs="+", type=int, default=[448])
    parser.add_argument("--finest", type=int, default=56)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--published-steps", type=int, default=20_000)
    parser.add_argument("--out", type=Path, default=Path("dosimeter-bench"))
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    model = target(options.backbone, classes=options.classes, size=options.size).to(options.device)
    view = Target.from_model(model, (3, options.size, options.size), Normalization())
    for part in options.parts:
        print(f"{part}: {PARTS[part].__doc__}", flush=True)
        PARTS[part](options, model, view)


if __name__ == "__main__":
    main()
