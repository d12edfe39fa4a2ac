"""NVIDIA FLARE: a filter that writes the weights that pass it."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from dosimeter.captures.store import write_capture, write_model
from dosimeter.interfaces import Training
from dosimeter.registry import PRIVACY, TRAININGS, Registry

try:
    import nvflare
    from nvflare.apis.dxo import DXO, DataKind
    from nvflare.apis.dxo_filter import DXOFilter
    from nvflare.apis.filter import FilterChainType, FilterContextKey
    from nvflare.apis.fl_constant import ReservedKey
    from nvflare.apis.fl_context import FLContext
    from nvflare.apis.shareable import Shareable
    from nvflare.app_common.app_constant import AppConstants
except ImportError as error:
    raise ImportError("dosimeter.integrations.nvflare needs NVIDIA FLARE: pip install 'dosimeter[nvflare]'") from error

FRAMEWORK = f"nvflare {nvflare.__version__}"
KINDS = {DataKind.WEIGHTS: "weights", DataKind.WEIGHT_DIFF: "difference"}
BEFORE = "dosimeter_model_before"  # in the context of a client's job: the hash of the model that arrived
log = logging.getLogger(__name__)


class CaptureFilter(DXOFilter):
    """Writes the weights, or their differences, that pass to `folder`, and lets them pass unchanged.

        recipe.add_client_input_filter(CaptureFilter("captures/{client}"), tasks=["train"])  # the model that arrives
        recipe.add_client_output_filter(CaptureFilter("captures/{client}", training={"name": "fedavg", "learning_rate": 0.1}),
        tasks=["train"])

    As the last output filter it sees what leaves the client after all others. On the server, as an input filter, it sees what arrives. A
    file in each client's own folder is best: `folder` may hold "{client}". `training` is a name, or a table with the name and options,
    since a job's
    configuration is JSON. So is `privacy` among the facts. `facts` are the other facts of `dm.write_capture`.
    """

    def __init__(self, folder: str, training: str | dict[str, Any] | None = None, facts: dict[str, Any] | None = None) -> None:
        super().__init__(supported_data_kinds=list(KINDS), data_kinds_to_filter=list(KINDS))
        self.folder, self.training, self.facts = folder, training, facts

    def process_dxo(self, dxo: DXO, shareable: Shareable, fl_ctx: FLContext) -> DXO | None:
        client = _client_of(shareable, fl_ctx)
        folder = Path(str(self.folder).replace("{client}", client))
        try:
            if self.get_prop(FilterContextKey.CHAIN_TYPE) == FilterChainType.TASK_DATA_CHAIN:
                fl_ctx.set_prop(BEFORE, write_model(folder, dxo.data), private=True, sticky=True)
            else:
                known = {"framework": FRAMEWORK, "before": fl_ctx.get_prop(BEFORE, ""), **(self.facts or {})}
                if isinstance(known.get("privacy"), dict):
                    known["privacy"] = _built(PRIVACY, known["privacy"])
                training = _training_of(self.training)
                number = shareable.get_header(AppConstants.CURRENT_ROUND, fl_ctx.get_prop(AppConstants.CURRENT_ROUND))
                write_capture(folder, dxo.data, kind=KINDS[dxo.data_kind], round=number, client=client, training=training, **known)
        except Exception as error:  # a tap must not end the federation
            log.error("dosimeter: the update of %s was not captured: %s", client, error)
        return None  # the data passes as it is


def _client_of(shareable: Shareable, fl_ctx: FLContext) -> str:
    """The client's name: on the server the peer's, on a client its own."""
    at_server = str(fl_ctx.get_process_type() or "").startswith("S")
    return str(shareable.get_peer_prop(ReservedKey.IDENTITY_NAME, None) if at_server else fl_ctx.get_identity_name())


def _training_of(value: str | dict[str, Any] | None) -> Training | None:
    if value is None or isinstance(value, str):
        return None if value is None else TRAININGS.build(value)
    return _built(TRAININGS, value)


def _built(registry: Registry[Any], table: dict[str, Any]) -> Any:
    """The method that a table with its name and options describes."""
    options = dict(table)
    return registry.build(options.pop("name"), **options)
