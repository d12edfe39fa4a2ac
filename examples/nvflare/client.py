"""What each client of the example runs: one step of SGD a round."""

from __future__ import annotations

import nvflare.client as flare
import torch
from digits import LEARNING_RATE, DigitNet, samples_of
from torch import nn


def main() -> None:
    flare.init()
    images, labels = samples_of(flare.get_site_name())
    while flare.is_running():
        model = DigitNet()
        model.load_state_dict(flare.receive().params)
        model.train()
        optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()
        flare.send(flare.FLModel(params=model.state_dict(), metrics={"accuracy": 0.0}, meta={"NUM_STEPS_CURRENT_ROUND": 1}))


if __name__ == "__main__":
    main()
