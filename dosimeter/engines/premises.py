"""What a proof from an update takes for granted: sentences that the update itself cannot refute."""

from __future__ import annotations

from dosimeter.client.training import MeanOfClients
from dosimeter.interfaces import Public

COPIES = "samples that count as copies are equal: two samples of one label whose logits are equal have the gradient of their mean"
OF_THE_AUDIT = "the client trained on the batch of the audit"


def premises_of(public: Public, *, size_matters: bool = True) -> tuple[str, ...]:
    """The premises of a certificate under the declared protocol.

    `size_matters`: the proof uses the batch size, or counts samples. A batch in which every sample occurs twice as often has the same mean
    gradient, so no update shows its batch size.
    """
    defenses = ", ".join(defense.name for defense in public.defenses)
    size = "no batch size is declared: the batch is the smallest batch that has this update"
    if public.batch_size is not None:
        size = f"the batch size is {public.batch_size}, as declared"
    return (
        f"the update is one gradient of the declared loss ({public.loss.name}) at the weights that were sent",
        f"no defense but {defenses} changed the update" if defenses else "no defense changed the update",
        *((size,) if size_matters else ()),
        *((f"the batch is that of {public.training.clients} clients together",) if isinstance(public.training, MeanOfClients) else ()),
        OF_THE_AUDIT,
    )
