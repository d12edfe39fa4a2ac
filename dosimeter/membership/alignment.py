"""Membership by the direction of the update."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator

from dosimeter.engines.membership.estimate import MembershipEstimate
from dosimeter.engines.membership.terms import candidate_terms
from dosimeter.interfaces import Exposure, MembershipTest
from dosimeter.network.copies import deep_copy
from dosimeter.registry import MEMBERSHIP
from dosimeter.types import Batch, Knowledge


@MEMBERSHIP.register("alignment")
@dataclass(frozen=True, kw_only=True)
class Alignment(MembershipTest):
    """Scores each candidate by how well its own gradient points along the update: in wide models, other samples' gradients do not.

    Li, Li & Ribeiro, "Effective Passive Membership Inference Attacks in Federated Learning Against Overparameterized Models", ICLR 2023:
    the cosine attack, on the update of one round. It reads any update, whatever the training and the defenses, and proves nothing.
    Departure: candidates go through the model in eval mode, so that batch norm gives each a gradient of its own.
    """

    needs = frozenset({Knowledge.CANDIDATES})
    reads_any_update = True

    def __call__(self, exposure: Exposure, candidates: Batch, rng: Generator) -> MembershipEstimate:
        calm = deep_copy(exposure.model).eval()
        sent = {name: change.flatten() for name, change in exposure.update.items()}
        lengths = {name: torch.linalg.vector_norm(change, dtype=torch.float64) for name, change in sent.items()}
        scores = []
        for _, terms in candidate_terms(exposure, self.name, model=calm):
            rows = {name: term.flatten(1).to(torch.promote_types(term.dtype, torch.float32)) for name, term in terms.items()}
            along = sum((row * sent[name]).sum(1, dtype=torch.float64) for name, row in rows.items())  # float64 sums of float32 products
            sizes = torch.stack([torch.linalg.vector_norm(row, dim=1, dtype=torch.float64) for row in rows.values()]).norm(dim=0)
            length = torch.stack([lengths[name] for name in terms]).norm()
            scores.append(along / (sizes * length).clamp(min=torch.finfo(torch.float64).tiny))
        found = torch.cat(scores)
        nobody = torch.zeros(len(found), dtype=torch.bool, device=found.device)
        return MembershipEstimate(scores=found, members=nobody, excluded=nobody, test=self.name)
