"""What a capture holds: the tensors that a client sent, and the facts about them that the server knows."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dosimeter.artefacts import fingerprint
from dosimeter.client.kinds import Kind
from dosimeter.client.receive import receive
from dosimeter.config import construct, describe
from dosimeter.interfaces import Defense, Exposure, Loss, PrivacySetting, Training
from dosimeter.options import NonNegativeInt, OptionError, PositiveInt, check_fields, mismatch
from dosimeter.record_schema import check_plain
from dosimeter.registry import DEFENSES
from dosimeter.types import Batch, Normalization

FORMAT = 2  # raised where a key is added, or where one changes its meaning
HASH_DIGITS = 64  # of SHA-256
LONGEST_NAME = 128  # characters of a client's or a framework's name


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What the server knows about an update beside its numbers. Absent facts are unknown."""

    kind: Kind
    round: NonNegativeInt | None = None
    client: str = ""
    clients: PositiveInt = 1  # whose mean the update is
    sizes: tuple[PositiveInt, ...] | None = None  # how many samples each of them has
    training: Training | None = None
    loss: Loss | None = None
    defenses: tuple[Defense, ...] = ()
    privacy: PrivacySetting | None = None
    batch_size: PositiveInt | None = None
    input_shape: tuple[PositiveInt, ...] | None = None
    normalization: Normalization | None = None
    mode: Literal["train", "eval"] | None = None
    framework: str = ""  # such as "flower 1.13"
    before: str = ""  # hash of the model that was sent: see `hash_of`

    def __post_init__(self) -> None:
        check_fields(self)
        for name in ("client", "framework"):
            if len(getattr(self, name)) > LONGEST_NAME:
                raise OptionError(name, f"expected at most {LONGEST_NAME} characters, got {len(getattr(self, name))}")
        if self.before and (len(self.before) != HASH_DIGITS or not set(self.before) <= set("0123456789abcdef")):
            raise mismatch("before", f"{HASH_DIGITS} hexadecimal digits", self.before)


@dataclass(frozen=True, kw_only=True)
class Capture(Facts):
    """An update as a client sent it, and what the server knows about it."""

    update: dict[str, Tensor] = field(repr=False)

    @property
    def facts(self) -> Facts:
        return Facts(**{each.name: getattr(self, each.name) for each in fields(Facts)})

    def receive(self, model: nn.Module, *, auxiliary: Batch | None = None, check_kind: bool = True, **facts: Any) -> Exposure:
        """The exposure, given the model that was sent. `facts` override what the capture says.

        Where a privacy setting is known and no defense is declared, what the setting does to the update is declared for it.
        """
        if self.before and hash_of(model.state_dict()) != self.before:
            raise ValueError(
                f"model: these are not the weights that were sent; the capture names a model with the hash {self.before[:16]}…"
            )
        if self.mode is not None and model.training != (self.mode == "train"):
            raise ValueError(f"model: the capture says that the client trained in {self.mode} mode; call model.{self.mode}() first")
        if self.clients > 1 and not any(defense.name == "secure_aggregation" for defense in self.defenses):
            together = DEFENSES.resolve("secure_aggregation", clients=self.clients, sizes=self.sizes)
            facts = {"defenses": (together, *facts.get("defenses", self.defenses))} | {k: v for k, v in facts.items() if k != "defenses"}
        known = {name: getattr(self, name) for name in ("training", "loss", "defenses", "batch_size", "input_shape", "normalization")}
        known |= facts
        setting = known.pop("privacy", self.privacy)
        if setting is not None and not known["defenses"] and (declared := setting.declared(self._unit(known))):
            known["defenses"] = tuple(DEFENSES.build(name, **options) for name, options in declared)
            check_kind = False  # the digits that tell the kinds apart are gone
        return receive(model, self.update, kind=self.kind, auxiliary=auxiliary, check_kind=check_kind, **known)

    def _unit(self, known: Mapping[str, Any]) -> float:
        """What turns a change of weights into a gradient."""
        return 1.0 if self.kind == "gradient" or known["training"] is None else known["training"].unit(known["batch_size"])


def hash_of(state: Mapping[str, Tensor]) -> str:
    """The hash of a model's tensors: SHA-256 over names, types, shapes and bytes, in the order of the names.

    A tensor without dimensions counts as a float64: servers that average a state turn batch norm's count of batches into a float.
    """
    plain = {name: value if value.ndim else value.to(torch.float64) for name, value in state.items()}
    parts = ((f"{name} {plain[name].dtype} {tuple(plain[name].shape)}\n", plain[name]) for name in sorted(plain))
    return fingerprint(*(part for pair in parts for part in pair), digits=HASH_DIGITS)


def write_facts(capture: Capture) -> str:
    """The facts as JSON."""
    dtypes = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in capture.update.values() if tensor.is_floating_point()})
    return json.dumps({"format": FORMAT, **describe(capture.facts), "dtypes": dtypes}, ensure_ascii=False, sort_keys=True)


def read_facts(text: str) -> Facts:
    """The facts in a text of JSON. What does not fit the format is a ValueError."""
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    if not isinstance(data, dict):
        raise mismatch("", "a table", data)
    check_plain(data, "")
    version = data.pop("format", None)
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise mismatch("format", "a positive int", version)
    if version > FORMAT:
        raise OptionError("format", f"is {version}, and this version of Dosimeter reads formats up to {FORMAT}; install a newer one")
    data.pop("dtypes", None)  # for readers of the header alone
    return construct(Facts, data)
