"""Dosimeter measures what a shared gradient gives away.

    import dosimeter as dm
    exposure = dm.observe(model, dm.Batch(x, y))
    labels = dm.recover_labels(exposure, "ilrg")
    found = dm.reconstruct(exposure, "inverting_gradients", labels=labels)
    scores = dm.score(found, dm.Batch(x, y))
    report = dm.audit(model, dm.Batch(x, y))

Names are imported when they are first used, so that `import dosimeter` does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dosimeter.version import __version__

if TYPE_CHECKING:
    from dosimeter.auditing import Audit, audit
    from dosimeter.build import attack, defense, feature_recovery, label_recovery
    from dosimeter.client import observe, receive
    from dosimeter.identifying import identifiability
    from dosimeter.inspection.inspect import inspect
    from dosimeter.losses import BinaryCrossEntropy, CrossEntropy, Focal
    from dosimeter.scoring import score
    from dosimeter.server import reconstruct, recover_features, recover_labels
    from dosimeter.training import FedAvg, FedSGD
    from dosimeter.types import (
        Batch,
        Client,
        Exposure,
        FeatureEstimate,
        Knowledge,
        LabelEstimate,
        Normalization,
        Outcome,
        Public,
        Reconstruction,
        Record,
        Refused,
    )

_HOMES = {
    "dosimeter.auditing": ("Audit", "audit"),
    "dosimeter.build": ("attack", "defense", "feature_recovery", "label_recovery"),
    "dosimeter.client": ("observe", "receive"),
    "dosimeter.identifying": ("identifiability",),
    "dosimeter.inspection.inspect": ("inspect",),
    "dosimeter.losses": ("BinaryCrossEntropy", "CrossEntropy", "Focal"),
    "dosimeter.scoring": ("score",),
    "dosimeter.server": ("reconstruct", "recover_features", "recover_labels"),
    "dosimeter.training": ("FedAvg", "FedSGD"),
    "dosimeter.types": (
        "Batch",
        "Client",
        "Exposure",
        "FeatureEstimate",
        "Knowledge",
        "LabelEstimate",
        "Normalization",
        "Outcome",
        "Public",
        "Reconstruction",
        "Record",
        "Refused",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Audit",
    "Batch",
    "BinaryCrossEntropy",
    "Client",
    "CrossEntropy",
    "Exposure",
    "FeatureEstimate",
    "FedAvg",
    "FedSGD",
    "Focal",
    "Knowledge",
    "LabelEstimate",
    "Normalization",
    "Outcome",
    "Public",
    "Reconstruction",
    "Record",
    "Refused",
    "__version__",
    "attack",
    "audit",
    "defense",
    "feature_recovery",
    "identifiability",
    "inspect",
    "label_recovery",
    "observe",
    "receive",
    "reconstruct",
    "recover_features",
    "recover_labels",
    "score",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dosimeter' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
