"""Which tokens occur in a batch, from the rows of the embedding's gradient."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from scipy.stats import chi2, gamma
from torch import Generator, Tensor

from dosimeter.client.training import FedAvg
from dosimeter.engines.premises import premises_of
from dosimeter.engines.sample_share import training_of_one_client
from dosimeter.engines.subspace.distortion import distortion_of, unmodelled
from dosimeter.engines.tokens.category_columns import doubts_of
from dosimeter.engines.tokens.lookups import Lookups, lookups_of
from dosimeter.engines.tokens.tied_head import TIED_SLACK, head_span
from dosimeter.engines.tokens.token_tables import TokenTable, find_table
from dosimeter.interfaces import Exposure, Public, TokenRecovery
from dosimeter.network.category_columns import Column, find_columns
from dosimeter.network.token_inputs import TokenEmbedding, find_token_embedding
from dosimeter.registry import TOKENS
from dosimeter.types import Distortion, Outcome, Refused, TokenEstimate

LARGEST_CHANCE = 1e-6  # that any token of the vocabulary is certified by accident
FALSE_SHARE = 0.05  # of the guesses behind noise that may be wrong (Benjamini & Hochberg 1995)
FAR = 8.0  # a row is a guess if its norm exceeds the usual row's by as many deviations, where nothing is known of the noise
CLEAR_GAP = 10.0  # of the output layer's span: its last singular value over the noise's edge, below which a direction may be missing


@TOKENS.register("embedding_rows")
@dataclass(frozen=True, kw_only=True)
class EmbeddingRows(TokenRecovery):
    """Lists the tokens whose rows of the embedding's gradient are not zero: the exact set of tokens in the batch.

    The row of a token is the sum of the slopes at its positions, and a token that does not occur has no position (Melis et al.,
    "Exploiting Unintended Feature Leakage in Collaborative Learning", IEEE S&P 2019, section 5.1; for LMs, Gupta et al., "Recovering
    Private Text in Federated Learning of Language Models", NeurIPS 2022, section 4.1).
    Departures: where the output layer shares the weight, its part Σ (p − y) hᵀ is taken off by its span, which the rows of
    absent tokens show. Behind declared noise each row is tested, with a bound on the chance that any token is listed by accident.
    Behind pruning a row that survives in part still proves its token. Adam and its like move no row without a gradient, so that the set
    is exact after local steps with any optimiser; weight decay moves all rows, and leaves guesses. A model that looks up other tokens
    than those of its texts shows this on texts of the server's own (`lookups_of`): nothing is proved by such rows. Columns of categories
    that have an embedding each, or a part of one, are read likewise, column by column, and so is any matrix that has a line for each
    token, such as a bag of embeddings or a layer on one-hot vectors.
    """

    reads_any_update = True

    def __call__(self, exposure: Exposure, rng: Generator) -> TokenEstimate:
        try:
            embedding = find_token_embedding(exposure.model, exposure.public.blank)
        except Refused:
            if columns := find_columns(exposure.model, exposure.public.blank):
                return _by_columns(exposure, columns)
            if (table := find_table(exposure)) is None:
                raise
            return _by_table(exposure, table)
        change = exposure.update.get(embedding.parameter)
        if change is None:
            raise Refused("embedding_rows needs the embedding's gradient: the client withholds it, or does not train the embedding")
        lookups = lookups_of(exposure, embedding)
        found = _tied(exposure, embedding, change, lookups, rng) if lookups.tied else _untied(exposure, embedding, change, lookups)
        return _without_added(found, lookups.added)


def _by_table(exposure: Exposure, table: TokenTable) -> TokenEstimate:
    if (change := exposure.update.get(table.embedding.parameter)) is None:
        raise Refused(
            f"embedding_rows needs the gradient of {table.embedding.name}, which has a line for each token: the client withholds it"
        )
    lookups = Lookups(tied=False, added=frozenset(), doubt=table.doubt)
    return _untied(exposure, table.embedding, table.rows(change), lookups)


def _by_columns(exposure: Exposure, columns: list[Column]) -> TokenEstimate:
    """The categories of each column that has an embedding; the tokens are those of all columns together."""
    sent = [column for column in columns if column.embedding.parameter in exposure.update]
    if not sent:
        raise Refused("embedding_rows needs an embedding's gradient: the client withholds them all, or trains none")
    found: dict[int, frozenset[int]] = {}
    estimates, certified, bars = [], frozenset[int](), dict[int, float]()
    for column, doubt in zip(sent, doubts_of(exposure, sent)):
        lookups = Lookups(tied=False, added=frozenset(), doubt=doubt)
        rows = range(column.offset, column.offset + column.size)
        one = _untied(exposure, column.embedding, exposure.update[column.embedding.parameter], lookups)
        estimates.append(one)
        found[column.place] = frozenset(row - column.offset for row in one.tokens if row in rows)
        proved = {row - column.offset: bar for row, bar in one.error_bars.items() if row in rows}
        certified |= frozenset(row - column.offset for row in one.certified if row in rows)
        bars = {token: min(bar, bars.get(token, 1.0)) for token, bar in (bars | proved).items()}
    whole = len({column.place for column in sent}) == exposure.public.input_shape[0]
    complete = whole and all(one.complete for one in estimates)
    shown = "; ".join(f"column {place + 1}: {', '.join(map(str, sorted(ids))) or 'none'}" for place, ids in sorted(found.items()))
    return TokenEstimate(
        tokens=frozenset().union(*found.values()),
        certified=certified,
        complete=complete,
        error_bars=bars,
        premises=next((one.premises for one in estimates if one.premises), ()),
        message="; ".join(dict.fromkeys(filter(None, (shown, *(one.message for one in estimates))))),
        outcome=Outcome.COMPLETED if complete else Outcome.PARTIAL,
        details={
            "embedding": ", ".join(dict.fromkeys(column.embedding.name for column in sent)),
            "vocabulary": max(column.size for column in sent),
            "columns": {str(place + 1): sorted(ids) for place, ids in found.items()},
        },
    )


def _without_added(found: TokenEstimate, added: frozenset[int]) -> TokenEstimate:
    """The estimate without tokens that the model adds to every text: their rows say nothing of the batch."""
    if not found.tokens & added:
        return found
    ids = ", ".join(str(token) for token in sorted(added))
    said = f"the model itself looks up token {ids} beside every text, so that this row says nothing of the batch"
    return replace(
        found,
        tokens=found.tokens - added,
        certified=found.certified - added,
        complete=False,
        error_bars={token: bar for token, bar in found.error_bars.items() if token not in added},
        message="; ".join(filter(None, (found.message, said))),
        outcome=Outcome.PARTIAL,
    )


def _untied(exposure: Exposure, embedding: TokenEmbedding, change: Tensor, lookups: Lookups) -> TokenEstimate:
    public = exposure.public
    distortion, doubt = distortion_of(change, public), lookups.doubt or _doubt(change, public)
    if doubt:
        return _guesses(change, embedding, f"guesses only: {doubt}")
    if distortion is None or distortion.noise == 0:
        proved = _proved_rows(change, distortion)
        found = frozenset(proved.nonzero().flatten().tolist())
        emptied = distortion is not None and not bool(distortion.live.all())
        return _estimate(exposure, embedding, found, certified=found, complete=not emptied, chances=dict.fromkeys(found, 0.0))
    chances = _chances(change, distortion)
    ordered, order = chances.sort()
    allowed = FALSE_SHARE * torch.arange(1, len(chances) + 1, device=chances.device) / len(chances)
    passing = (ordered <= allowed).nonzero().flatten()
    found = frozenset(order[: int(passing.max()) + 1].tolist()) if len(passing) else frozenset()
    bars = {token: min(1.0, float(chances[token]) * len(chances)) for token in found}
    certified = frozenset(token for token, chance in bars.items() if chance <= LARGEST_CHANCE)
    return _estimate(exposure, embedding, found, certified=certified, complete=False, chances=bars)


def _proved_rows(change: Tensor, distortion: Distortion | None) -> Tensor:
    """Which rows hold an entry that cannot have been zero: (V,) bool."""
    if distortion is None:
        return change.flatten(1).any(1)
    nonzero = torch.where(distortion.live, change != 0, (distortion.low > 0) | (distortion.high < 0))
    return nonzero.any(1)


def _chances(change: Tensor, distortion: Distortion) -> Tensor:
    """The chance that a row of noise alone is as large: (V,), the larger one under Gaussian and under Laplacian noise.

    Squares of Gaussian entries add up to χ², magnitudes of Laplacian entries to a gamma distribution.
    """
    live = distortion.live
    scaled = torch.where(live, change, 0).double() / distortion.noise
    count = live.sum(1).double().clamp_min(1).cpu().numpy()
    gaussian = chi2.sf(scaled.square().sum(1).cpu().numpy(), count)
    laplacian = gamma.sf(math.sqrt(2) * scaled.abs().sum(1).cpu().numpy(), count)
    return torch.from_numpy(gaussian).maximum(torch.from_numpy(laplacian))


def _guesses(change: Tensor, embedding: TokenEmbedding, message: str) -> TokenEstimate:
    """The rows that stand out, where nothing is known of what was done to them."""
    sizes = change.double().norm(dim=1)
    usual = sizes.median()
    spread = (sizes - usual).abs().median()
    found = frozenset((sizes > usual + FAR * spread).nonzero().flatten().tolist())
    return TokenEstimate(tokens=found, outcome=Outcome.PARTIAL, message=message, details={"embedding": embedding.name})


def _tied(exposure: Exposure, embedding: TokenEmbedding, change: Tensor, lookups: Lookups, rng: Generator) -> TokenEstimate:
    """The tokens whose rows leave the span of the output layer's part."""
    public = exposure.public
    if why := public.training.preconditioning():
        return _guesses(change, embedding, f"guesses only: the output layer shares the weight, and {why}")
    distortion, doubt = distortion_of(change, public), lookups.doubt or _doubt(change, public)
    if distortion is not None and not bool(distortion.live.all()):
        doubt = doubt or "entries were emptied or rounded, so that the output layer's part cannot be taken off"
    declared = 0.0 if distortion is None else distortion.noise
    most = None if public.batch_size is None else public.batch_size * public.input_shape[0]
    try:
        span = head_span(change, rng, declared=declared, most=most)
    except Refused as refusal:
        return _guesses(change, embedding, f"guesses only: {refusal}; the rows that stand out are of inputs and of targets")
    distances, bars = span.distances(change)
    outside = distances > TIED_SLACK * bars
    if declared:
        residual = change.double() - change.double() @ span.right.T @ span.right
        chance = torch.from_numpy(chi2.sf((residual.norm(dim=1) / declared).square().cpu().numpy(), span.columns - span.rank))
        outside = chance.to(change.device) * len(change) <= LARGEST_CHANCE
    found = frozenset(outside.nonzero().flatten().tolist())
    if span.gap < CLEAR_GAP:
        doubt = doubt or "the rank of the output layer's part is not clear"
    sure = frozenset() if doubt or declared else found
    message = f"guesses only: {doubt}" if doubt else ""
    estimate = _estimate(exposure, embedding, found, certified=sure, complete=False, chances=dict.fromkeys(sure, 0.0), message=message)
    premise = f"what the output layer adds to the shared weight has rank {span.rank}, as the rows of half of the vocabulary show"
    details = {**estimate.details, "tied": True, "head_rank": span.rank}
    return TokenEstimate(
        tokens=estimate.tokens,
        certified=sure,
        error_bars=estimate.error_bars,
        premises=(*estimate.premises, premise) if sure else (),
        message=estimate.message,
        details=details,
        outcome=estimate.outcome,
    )


def _doubt(change: Tensor, public: Public) -> str:
    """Why a row proves nothing here, "" where it does."""
    if names := unmodelled(change, public):
        return f"{names} may change entries of the embedding's gradient, and does not say how"
    training = training_of_one_client(public.training)
    if isinstance(training, FedAvg) and training.decays:
        return "weight decay moves the rows of absent tokens too, and is taken off up to rounding only"
    noisy = [place for place, defense in enumerate(public.defenses) if defense.adds_noise()]
    distortion = distortion_of(change, public)
    if noisy and (distortion is None or distortion.noise == 0):
        return f"the size of the noise of {public.defenses[noisy[-1]].name} is not known"
    if noisy and any(defense.scaling() != "none" for defense in public.defenses[noisy[0] + 1 :]):
        return "the noise was scaled by an unknown factor"
    return ""


def _estimate(
    exposure: Exposure,
    embedding: TokenEmbedding,
    found: frozenset[int],
    *,
    certified: frozenset[int],
    complete: bool,
    chances: dict[int, float],
    message: str = "",
) -> TokenEstimate:
    premises = premises_of(exposure.public, size_matters=False) if certified or complete else ()
    if not complete:
        left = "more tokens may be in the batch: a row that the defenses emptied or drowned shows none"
        message = "; ".join(filter(None, (message, left))) if exposure.public.defenses else message
    return TokenEstimate(
        tokens=found,
        certified=certified,
        complete=complete,
        error_bars=chances,
        premises=premises,
        message=message,
        outcome=Outcome.COMPLETED if complete else Outcome.PARTIAL,
        details={"embedding": embedding.name, "vocabulary": embedding.vocabulary},
    )
