"""What a client may refuse to send: reasons to hold an update back."""

from __future__ import annotations

from dosimeter.interfaces import Exposure
from dosimeter.runs.server import recover_features, recover_labels, recover_maps
from dosimeter.types import Refused


def proved(exposure: Exposure) -> str:
    """Why an update should not leave: what it proves of the batch's labels, features or activation maps. "" where it proves nothing.

    It runs the methods whose results are certificates, which take seconds. Nothing proved is no proof of safety.
    """
    reasons = []
    for name, what in (("labels", _labels), ("features", _features), ("activation maps", _maps)):
        try:
            count = what(exposure)
        except Refused:
            continue
        if count:
            reasons.append(f"{name} of {count} samples" if name != "labels" else "its labels")
    return f"it proves {' and '.join(reasons)}" if reasons else ""


def _labels(exposure: Exposure) -> int:
    return int(recover_labels(exposure, "subspace").certified)


def _features(exposure: Exposure) -> int:
    return int(recover_features(exposure, "subspace").certified.sum())


def _maps(exposure: Exposure) -> int:
    return int(recover_maps(exposure).certified.sum())
