"""How one sample enters an update: with which share, and whether by itself."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from dosimeter.client.training import FedAvg, MeanOfClients, sends_one_gradient
from dosimeter.interfaces import Public, Training
from dosimeter.types import Update


def share_of_one_sample(public: Public, sent: Update, names: Collection[str]) -> float | None:
    """The factor with which a sample's own gradient enters the layers `names` of the update that was sent; None where it is unknown."""
    if public.batch_size is None or not sends_gradient_at_model(public.training) or not unscaled_layers(public, sent).issuperset(names):
        return None
    return 1 / public.batch_size


def largest_share(public: Public) -> float:
    """The largest factor with which a sample's own gradient can enter an update, since defenses only shrink it."""
    return 1 / (public.batch_size or 1)


def unscaled_layers(public: Public, sent: Update) -> frozenset[str]:
    """The layers of the update that no defense multiplied by an unknown factor, as declared, or as their norms show."""
    kept = frozenset(sent)
    for place, defense in enumerate(public.defenses):
        if defense.side != "update" or defense.scaling() == "none":
            continue
        later = public.defenses[place + 1 :]
        readable = not isinstance(public.training, MeanOfClients) and not any(one.distorts() or one.scaling() != "none" for one in later)
        kept &= defense.unscaled(sent) if readable else frozenset()
    return kept


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
