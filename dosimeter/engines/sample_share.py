"""How one sample enters an update: with which share, and whether by itself."""

from __future__ import annotations

from torch import nn

from dosimeter.client.training import FedAvg, MeanOfClients, sends_one_gradient
from dosimeter.interfaces import Public, Training


def share_of_one_sample(public: Public) -> float | None:
    """The factor with which a sample's own gradient enters the update; None where it is unknown."""
    scaled = any(defense.side == "update" and defense.scaling() != "none" for defense in public.defenses)
    if public.batch_size is None or scaled or not sends_gradient_at_model(public.training):
        return None
    return 1 / public.batch_size


def sends_gradient_at_model(training: Training) -> bool:
    """Whether the update is the gradient at the received model, of one client or averaged over several."""
    return sends_one_gradient(training_of_one_client(training))


def takes_local_steps(training: Training) -> bool:
    """Whether the model moves while the client trains."""
    return isinstance(training_of_one_client(training), FedAvg) and not sends_gradient_at_model(training)


def training_of_one_client(training: Training) -> Training:
    """What each client does under secure aggregation, else the training itself."""
    return training.each if isinstance(training, MeanOfClients) else training


def mixes_samples(model: nn.Module) -> bool:
    """Whether batch statistics or dropout make one sample's slope depend on more than the sample."""
    mixing = (nn.modules.batchnorm._BatchNorm, nn.modules.dropout._DropoutNd)
    return any(isinstance(module, mixing) and module.training for module in model.modules())
