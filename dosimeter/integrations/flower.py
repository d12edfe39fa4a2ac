"""Flower: a strategy that keeps what clients send, and a client mod that keeps, or holds back, what leaves."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from dosimeter.captures.capture import Capture
from dosimeter.captures.store import write_capture
from dosimeter.inspection.inspect import inspect
from dosimeter.interfaces import Exposure
from dosimeter.models.loading import without_prefix
from dosimeter.models.named_code import first_sentence
from dosimeter.registry import privacy, privacy_of

try:
    import flwr
    from flwr.app import ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord
    from flwr.clientapp.typing import ClientAppCallable
    from flwr.serverapp import Grid
    from flwr.serverapp.strategy import Strategy
except ImportError as error:
    raise ImportError("dosimeter.integrations.flower needs Flower: pip install 'dosimeter[flower]'") from error

FRAMEWORK = f"flower {flwr.__version__}"
ROUND = "server-round"  # Flower's own key in the configuration of a round
HELD_BACK = 451  # code of the error that the server gets in place of an update
log = logging.getLogger(__name__)


class CapturingStrategy(Strategy):
    """Any strategy of Flower; each client's reply is also written to `folder`, with the model that this client was sent.

        strategy = CapturingStrategy(FedAvg(), "captures", training=dm.FedAvg(learning_rate=0.1), input_shape=(3, 32, 32))

    Wrap the strategy that is nearest to the clients: a wrapper outside sees every reply as it came. `facts` are those of
    `dm.write_capture`. A strategy for differential privacy is read, and its setting written too. A reply that cannot be written is
    logged, and training goes on.
    """

    def __init__(self, strategy: Strategy, folder: str | Path, *, kind: str = "weights", **facts: Any) -> None:
        self.strategy, self.folder = strategy, Path(folder)
        self.facts = {"kind": kind, "framework": FRAMEWORK, "privacy": privacy_of(strategy), **_with_setting(facts)}
        self._sent: dict[int, dict[str, Tensor]] = {}  # by the client's node id

    def configure_train(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        messages = list(self.strategy.configure_train(server_round, arrays, config, grid))
        self._sent = {message.metadata.dst_node_id: _tensors(message) for message in messages}
        return messages

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord | None, MetricRecord | None]:
        replies = list(replies)
        for reply in replies:
            if not reply.has_error():
                node = reply.metadata.src_node_id
                _write(self.folder, _tensors(reply), self._sent.get(node), round=server_round, client=str(node), **self.facts)
        return self.strategy.aggregate_train(server_round, replies)

    def configure_evaluate(self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid) -> Iterable[Message]:
        return self.strategy.configure_evaluate(server_round, arrays, config, grid)

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        return self.strategy.aggregate_evaluate(server_round, replies)

    def summary(self) -> None:
        self.strategy.summary()


class CaptureMod:
    """A client mod that writes what leaves the client to `folder`; the first in the list sees it after all other mods.

        app = ClientApp(mods=[CaptureMod("captures", training=dm.FedAvg(learning_rate=0.1)), LocalDpMod(...)])

    `privacy` may be the `LocalDpMod` itself. With `model`, the model that arrives is first loaded into a copy of it and inspected, and
    nothing is trained on a suspicious one. With `forbid`, a function of the exposure that returns a reason or "", an update is held back
    where there is a reason: the server gets an error in its place. `dosimeter.integrations.gates.proved` is such a function.
    """

    def __init__(
        self,
        folder: str | Path | None,
        *,
        model: nn.Module | None = None,
        forbid: Callable[[Exposure], str] | None = None,
        kind: str = "weights",
        **facts: Any,
    ) -> None:
        if forbid is not None and model is None:
            raise ValueError("forbid: expected `model` beside it, since an update is judged together with its model")
        self.folder, self.model, self.forbid = None if folder is None else Path(folder), model, forbid
        self.facts = {"kind": kind, "framework": FRAMEWORK, **_with_setting(facts)}

    def __call__(self, message: Message, context: Context, call_next: ClientAppCallable) -> Message:
        if not message.metadata.message_type.startswith("train"):
            return call_next(message, context)
        sent = _tensors(message)
        received = None
        if self.model is not None:
            received = copy.deepcopy(self.model)
            try:
                received.load_state_dict(without_prefix(sent))
                found = inspect(received)
            except Exception as error:  # nothing is trained on a model that nobody can look at
                return _held_back(message, f"the model that arrived could not be inspected: {first_sentence(error)}")
            if found.suspicious:
                return _held_back(message, "the model that arrived looks rigged: " + "; ".join(str(finding) for finding in found.findings))
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        update = _tensors(reply)
        facts = {"round": _round_of(message), "client": str(message.metadata.dst_node_id), **self.facts}
        if self.folder is not None:
            _write(self.folder, update, sent, **facts)
        if self.forbid is not None and received is not None:
            try:
                reason = self.forbid(Capture(update=update, **facts).receive(received))
            except (ValueError, TypeError) as error:
                reason = f"the update could not be judged: {error}"
            if reason:
                return _held_back(message, reason)
        return reply


def _with_setting(facts: dict[str, Any]) -> dict[str, Any]:
    """The facts, with a privacy setting in place of a framework's own object."""
    return facts if facts.get("privacy") is None else facts | {"privacy": privacy(facts["privacy"])}


def _tensors(message: Message) -> dict[str, Tensor]:
    """All arrays of a message by name. Two records with a name in common keep both, under the record's name too."""
    records = message.content.array_records
    if len(records) == 1:
        return next(iter(records.values())).to_torch_state_dict()
    return {f"{key}.{name}": value for key, record in records.items() for name, value in record.to_torch_state_dict().items()}


def _round_of(message: Message) -> int | None:
    for record in message.content.config_records.values():
        if isinstance(record.get(ROUND), int):
            return record[ROUND]
    return None


def _write(folder: Path, update: dict[str, Tensor], before: dict[str, Tensor] | None, **facts: Any) -> None:
    try:
        write_capture(folder, update, before=before, **facts)
    except Exception as error:  # a tap must not end the federation
        log.error("dosimeter: the update of client %s was not captured: %s", facts.get("client"), error)


def _held_back(message: Message, reason: str) -> Message:
    log.warning("dosimeter: the update is held back: %s", reason)
    return Message(Error(code=HELD_BACK, reason=f"held back by Dosimeter: {reason}"), reply_to=message)
