"""What the tests of defenses share: a client that has not been defended yet."""

import pytest
from torch import nn

from dosimeter.client.losses import CrossEntropy
from dosimeter.client.training import FedSGD
from dosimeter.interfaces import Client


@pytest.fixture
def client(classifier, batch) -> Client:
    return Client(model=classifier, batch=batch, training=FedSGD(), loss=CrossEntropy())


class TiedClassifier(nn.Module):
    """A head that shares its weight with a layer below, and goes by that layer's name in an update."""

    def __init__(self):
        super().__init__()
        self.first, self.below, self.back, self.head = nn.Linear(64, 12), nn.Linear(12, 10), nn.Linear(10, 12), nn.Linear(12, 10)
        self.head.weight = self.below.weight

    def forward(self, images):
        return self.head(self.back(self.below(self.first(images.flatten(1)).relu()).relu()).relu())


@pytest.fixture
def tied() -> nn.Module:
    return TiedClassifier()
