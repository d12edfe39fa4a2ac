"""Dosimeter measures what a shared gradient gives away.

    import dosimeter as dm
    exposure = dm.observe(model, dm.Batch(x, y))
    labels = dm.recover_labels(exposure, "ilrg")
    found = dm.reconstruct(exposure, "inverting_gradients", labels=labels)
    scores = dm.score(found, dm.Batch(x, y))
    report = dm.audit(model, dm.Batch(x, y))

Names are imported when they are first used, so that `import dosimeter` does not import torch.
"""

# ruff: noqa: E402 (nothing may be imported before the working directory is out of the way)
import sys

_NAMED = {word.removeprefix("-m").partition(".")[0] for word in sys.orig_argv}
if sys.argv[:1] == ["-m"] and __name__ in _NAMED and not sys.flags.safe_path:  # `python -m dosimeter` imports this file first
    sys.path.pop(0)  # the working directory, whose files must not shadow installed modules: not even `__future__`, so it is not used here

import importlib
from typing import TYPE_CHECKING, Any

from dosimeter.version import __version__

if TYPE_CHECKING:
    from dosimeter.captures.aggregate import aggregate
    from dosimeter.captures.capture import Capture
    from dosimeter.captures.store import read_capture, write_capture
    from dosimeter.client.losses import BinaryCrossEntropy, CrossEntropy, Focal, SquaredError, TokenCrossEntropy
    from dosimeter.client.observe import observe
    from dosimeter.client.receive import preflight, receive
    from dosimeter.client.training import FedAvg, FedSGD
    from dosimeter.columns import Category, Columns, Number
    from dosimeter.engines.identifiability import identifiability
    from dosimeter.engines.membership.estimate import MembershipEstimate
    from dosimeter.inspection.inspect import inspect
    from dosimeter.interfaces import Client, Exposure, Public
    from dosimeter.registry import attack, defense, feature_recovery, label_recovery, privacy
    from dosimeter.runs.audit import Audit, audit, read
    from dosimeter.runs.ceilings import Ceilings, ceilings
    from dosimeter.runs.disaggregate import Disaggregation, disaggregate
    from dosimeter.runs.dose import dose
    from dosimeter.runs.dp_guarantee import DPGuarantee, dp_guarantee
    from dosimeter.runs.membership import test_membership
    from dosimeter.runs.server import reconstruct, recover_features, recover_labels, recover_maps, recover_targets, recover_tokens
    from dosimeter.surfaces.scoring import score
    from dosimeter.types import (
        Batch,
        Ceiling,
        FeatureEstimate,
        Impossible,
        Knowledge,
        LabelEstimate,
        MapEstimate,
        Normalization,
        Outcome,
        Reconstruction,
        Record,
        Refused,
        TargetEstimate,
        TokenEstimate,
    )

_HOMES = {
    "dosimeter.captures.aggregate": ("aggregate",),
    "dosimeter.captures.capture": ("Capture",),
    "dosimeter.runs.disaggregate": ("Disaggregation", "disaggregate"),
    "dosimeter.runs.dose": ("dose",),
    "dosimeter.runs.dp_guarantee": ("DPGuarantee", "dp_guarantee"),
    "dosimeter.captures.store": ("read_capture", "write_capture"),
    "dosimeter.runs.audit": ("Audit", "audit", "read"),
    "dosimeter.runs.ceilings": ("Ceilings", "ceilings"),
    "dosimeter.engines.membership.estimate": ("MembershipEstimate",),
    "dosimeter.runs.membership": ("test_membership",),
    "dosimeter.registry": ("attack", "defense", "feature_recovery", "label_recovery", "privacy"),
    "dosimeter.client.observe": ("observe",),
    "dosimeter.client.receive": ("preflight", "receive"),
    "dosimeter.columns": ("Category", "Columns", "Number"),
    "dosimeter.engines.identifiability": ("identifiability",),
    "dosimeter.inspection.inspect": ("inspect",),
    "dosimeter.client.losses": ("BinaryCrossEntropy", "CrossEntropy", "Focal", "SquaredError", "TokenCrossEntropy"),
    "dosimeter.surfaces.scoring": ("score",),
    "dosimeter.runs.server": ("reconstruct", "recover_features", "recover_labels", "recover_maps", "recover_targets", "recover_tokens"),
    "dosimeter.client.training": ("FedAvg", "FedSGD"),
    "dosimeter.interfaces": ("Client", "Exposure", "Public"),
    "dosimeter.types": (
        "Batch",
        "Ceiling",
        "FeatureEstimate",
        "Impossible",
        "Knowledge",
        "LabelEstimate",
        "MapEstimate",
        "Normalization",
        "Outcome",
        "Reconstruction",
        "Record",
        "Refused",
        "TargetEstimate",
        "TokenEstimate",
    ),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Audit",
    "Batch",
    "BinaryCrossEntropy",
    "Capture",
    "Category",
    "Ceiling",
    "Ceilings",
    "Client",
    "Columns",
    "CrossEntropy",
    "DPGuarantee",
    "Disaggregation",
    "Exposure",
    "FeatureEstimate",
    "FedAvg",
    "FedSGD",
    "Focal",
    "Impossible",
    "Knowledge",
    "LabelEstimate",
    "MapEstimate",
    "MembershipEstimate",
    "Normalization",
    "Number",
    "Outcome",
    "Public",
    "Reconstruction",
    "Record",
    "Refused",
    "SquaredError",
    "TargetEstimate",
    "TokenCrossEntropy",
    "TokenEstimate",
    "__version__",
    "aggregate",
    "attack",
    "audit",
    "ceilings",
    "defense",
    "disaggregate",
    "dose",
    "dp_guarantee",
    "feature_recovery",
    "identifiability",
    "inspect",
    "label_recovery",
    "observe",
    "preflight",
    "privacy",
    "read",
    "read_capture",
    "receive",
    "reconstruct",
    "recover_features",
    "recover_labels",
    "recover_maps",
    "recover_targets",
    "recover_tokens",
    "score",
    "test_membership",
    "write_capture",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'dosimeter' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
