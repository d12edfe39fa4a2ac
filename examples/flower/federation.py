"""A federation in Flower with a tap, and a report about one of its rounds.

    pip install 'dosimeter[flower]'
    python examples/flower/federation.py --out out/flower

Four clients train a small network on handwritten digits for two rounds, as Flower's PyTorch quickstart does: SGD with momentum, a shuffled
DataLoader, and the whole state_dict as the reply. Two lines make the tap: the wrapped strategy and its folder. The last step audits
what one client sent in the first round.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dosimeter as dm
from dosimeter.captures.store import captures_in, read_model
from dosimeter.data.load import load_images
from dosimeter.integrations.flower import CapturingStrategy

CLIENTS, SAMPLES, LEARNING_RATE, MOMENTUM = 4, 8, 0.05, 0.9


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(256, 10))


client = ClientApp()


@client.train()
def train(message: Message, context: Context) -> Message:
    model = build_model()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    model.train()
    digits, first = load_images("digits"), int(context.node_config["partition-id"]) * SAMPLES
    data = TensorDataset(digits.images[first : first + SAMPLES].float(), digits.labels[first : first + SAMPLES])
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
    for images, labels in DataLoader(data, batch_size=SAMPLES, shuffle=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": MetricRecord({"num-examples": SAMPLES})})
    return Message(content, reply_to=message)


def federation(folder: Path) -> ServerApp:
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0)
        training = dm.FedAvg(learning_rate=LEARNING_RATE, momentum=MOMENTUM)
        tapped = CapturingStrategy(strategy, folder, training=training, input_shape=(1, 8, 8), mode="train")
        tapped.start(grid=grid, initial_arrays=ArrayRecord(build_model().state_dict()), num_rounds=2)

    return server


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("out/flower"))
    parser.add_argument("--audit", choices=("first", "none"), default="first", help="audit the first capture, or none")
    words = parser.parse_args()
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(federation(words.out / "captures"), client, num_supernodes=CLIENTS, backend_config=resources)
    path = captures_in(words.out / "captures")[0]
    if words.audit == "first":
        capture, model = dm.read_capture(path), build_model()
        model.load_state_dict(read_model(path, capture))
        report = dm.audit(exposure=capture.receive(model.train()), out=words.out / "report")
        print(report.save(words.out / "report"))


if __name__ == "__main__":
    main()
