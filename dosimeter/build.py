"""Methods by name: `dm.attack("dlg", steps=100)` and its siblings."""

from __future__ import annotations

from typing import Any

from dosimeter.interfaces import Attack, Defense, FeatureRecovery, LabelRecovery
from dosimeter.registry import ATTACKS, DEFENSES, FEATURES, LABELS


def attack(name: str, /, **options: Any) -> Attack:
    """An attack by its name in `dosimeter list`, with its options."""
    return ATTACKS.build(name, **options)


def defense(name: str, /, **options: Any) -> Defense:
    """A defense by its name in `dosimeter list`, with its options."""
    return DEFENSES.build(name, **options)


def label_recovery(name: str, /, **options: Any) -> LabelRecovery:
    """A label recovery by its name in `dosimeter list`, with its options."""
    return LABELS.build(name, **options)


def feature_recovery(name: str, /, **options: Any) -> FeatureRecovery:
    """A feature recovery by its name in `dosimeter list`, with its options."""
    return FEATURES.build(name, **options)
