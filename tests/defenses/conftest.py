"""What the tests of defenses share: a client that has not been defended yet."""

import pytest

from dosimeter.losses import CrossEntropy
from dosimeter.training import FedSGD
from dosimeter.types import Client


@pytest.fixture
def client(classifier, batch) -> Client:
    return Client(model=classifier, batch=batch, training=FedSGD(), loss=CrossEntropy())
