"""Error feedback: what compression left out of a message is added to the next one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Generator, Tensor

from dosimeter.defenses.low_rank import LowRank
from dosimeter.defenses.outgoing import Memory, RememberingDefense, working_dtype
from dosimeter.defenses.sign import Sign
from dosimeter.options import PositiveInt
from dosimeter.registry import DEFENSES
from dosimeter.types import Encoding, Update

START = "start of "  # what the names of right factors begin with in the memory; the errors have the layers' names


@DEFENSES.register("error_feedback")
@dataclass(frozen=True, kw_only=True)
class ErrorFeedback(RememberingDefense):
    """Compresses the update by `sign` or `low_rank`, and adds what was left out to the next round's update.

    Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes", ICML 2019 (thesis Table 2.2): Algorithm 2,
    with scaled signs. Vogels, Karimireddy & Jaggi, "PowerSGD", NeurIPS 2019: Algorithm 2, with one power iteration from the last round's
    right factor. With p_t = g_t + e_t, a client sends Δ_t = C(p_t) and keeps e_{t+1} = p_t − Δ_t.
    The first message is that of plain compression. All messages of T rounds add up to all updates less e_T. So a server that averages
    them has the mean update to within e_T / T: the compression hides less with every round.
    Departure: errors are in units of the update. A learning rate that changes would rescale them. An audit repeats one update
    (see `RememberingDefense`).
    """

    promise: ClassVar[str] = "nothing: over many rounds the messages add up to the updates that were compressed"
    breaks: ClassVar[str] = "magnitudes or directions of single messages; training is as good as without compression in the end"
    strengths: ClassVar = ({"compressor": "low_rank", "rank": 2, "rounds": 4}, {"compressor": "sign", "rounds": 4})

    compressor: Literal["sign", "low_rank"] = "sign"
    rank: PositiveInt = 1  # of low_rank

    def distorts(self) -> bool:
        return True

    def encoding(self, before: Encoding) -> Encoding:
        return Encoding(bits=1, sparse=before.sparse) if self.compressor == "sign" else Encoding(rank=self.rank)

    def send(self, update: Update, memory: Memory, rng: Generator) -> tuple[Update, Memory]:
        sent: Update = {}
        kept: Memory = {}
        for name, change in update.items():
            wanted = change.to(working_dtype(change)) + memory.get(name, 0)  # p_t
            message, start = self._compress(wanted, memory.get(START + name), rng)
            sent[name] = message.to(change.dtype)
            kept[name] = wanted - sent[name].to(wanted)  # e_{t+1}
            if start is not None:
                kept[START + name] = start
        return sent, kept

    def _compress(self, wanted: Tensor, start: Tensor | None, rng: Generator) -> tuple[Tensor, Tensor | None]:
        if self.compressor == "low_rank":
            return LowRank(rank=self.rank).compress(wanted, start, rng)
        return Sign().protect({"": wanted}, rng)[""], None
