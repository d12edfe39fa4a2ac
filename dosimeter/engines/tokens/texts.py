"""Texts from the tokens that may stand at each place: every place of a right text passes the test of a layer that sees contexts."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Generator, Tensor

from dosimeter.engines.tokens.levels import PASS, Level

Text = tuple[int, ...]
MOST_BRANCHES = 1024  # unfinished texts of a decoder that are followed
MOST_AT_ONCE = 2**16  # candidates that are built at once
SWEEPS = 6  # over all places of an encoder's text
RESTARTS = 4  # of a text of an encoder, from other tokens
ANCHORS = 3  # places from which the texts of an encoder are searched
MOST_BEGINNINGS = 4096  # of texts, whose vectors are compared
MOST_EXCHANGES = 2048  # of two tokens of an encoder's text
SEEN = 1.0  # error bars within which a token follows a text whose vectors drifted, whatever is nearer
NEARLY = 3.0  # times the distance of the nearest token, up to which others follow a text whose vectors drifted


@dataclass(frozen=True)
class FoundText:
    """One text."""

    tokens: Text
    ratio: float  # the largest distance of its vectors from the span, in error bars
    margin: float = float("inf")  # the same of the nearest text that differs a little, over what may pass
    told: int | None = None  # how many of the first tokens its own vectors tell; none: not looked at
    shared: bool = False  # another beginning of a text has the vector of the last token too

    @property
    def passes(self) -> bool:
        return self.ratio <= PASS

    @property
    def told_whole(self) -> bool:
        return self.told == len(self.tokens) and not self.shared


@dataclass(frozen=True)
class FoundTexts:
    """All texts, the surest first, and how clear the decisions were."""

    texts: list[FoundText]
    margin: float  # error bars of the nearest vector that did not pass, over those that may pass
    cut: bool = False  # the search ended at its limit of tries


def follow(level: Level, choices: list[Tensor], batch_size: int | None, *, tries: int) -> FoundTexts:
    """Texts of a decoder, token by token: a vector depends on the tokens up to its place, so that a wrong token shows at once.

    `choices` are the tokens that may stand at each place. A text ends where no token follows. Petrov et al., Algorithm 2. Where the
    vectors drifted in local steps, only tokens nearly as near as the nearest one of their step follow a text, and all vectors of a text
    are held against the weights of the same step. At the limit of `tries` of a text, what was followed so far are guesses.
    """
    models = 1 + len(level.later)
    branches, worst = torch.zeros(1, 0, dtype=torch.int64, device=choices[0].device), torch.zeros(1, models, dtype=torch.float64)
    ended: list[FoundText] = []
    margin = float("inf")
    for place, tokens in enumerate(choices):
        if len(tokens) == 0:
            break
        tries -= len(branches) * len(tokens)
        if tries < 0:
            return FoundTexts(_surest(ended + _unfinished(branches, worst), batch_size), margin=0.0, cut=True)
        grown, ratios, alive = [], [], torch.zeros(len(branches), dtype=torch.bool)
        for rows in torch.arange(len(branches)).split(max(1, MOST_AT_ONCE // len(tokens))):
            tried = torch.cat([branches[rows].repeat_interleave(len(tokens), 0), tokens.repeat(len(rows))[:, None]], 1)
            each = level.ratios_by_model(tried, [place])[:, 0].cpu()  # (n, models)
            nearest_model = each.amin(1)
            margin = min(margin, float(nearest_model[nearest_model > PASS].min()) / PASS if bool((nearest_model > PASS).any()) else margin)
            before = worst[rows].repeat_interleave(len(tokens), 0)
            passing = torch.maximum(each, before).amin(1) <= PASS
            if level.later and place:
                passing &= _nearest_of_their_step(each, len(tokens))
            each = torch.maximum(each, before)
            near = passing.nonzero().flatten()
            grown.append(tried[near.to(tried.device)])
            ratios.append(each[near])
            alive[rows[near // len(tokens)]] = True
        ended += [FoundText(tuple(branches[i].tolist()), float(worst[i].min())) for i in (~alive).nonzero().flatten().tolist() if place]
        branches, worst = torch.cat(grown), torch.cat(ratios)
        if len(branches) > MOST_BRANCHES:
            kept = worst.amin(1).argsort()[:MOST_BRANCHES]
            branches, worst = branches[kept.to(branches.device)], worst[kept]
        if len(branches) == 0:
            break
    found = ended + _unfinished(branches, worst)
    return FoundTexts(_without_idle_runs(_told(level, _surest(found, batch_size if level.later else None)), batch_size), margin)


def _unfinished(branches: Tensor, worst: Tensor) -> list[FoundText]:
    return [FoundText(tuple(row), far) for row, far in zip(branches.tolist(), worst.amin(1).tolist()) if row]


def _told(level: Level, texts: list[FoundText]) -> list[FoundText]:
    """The texts, each with how many of its tokens are told, and whether its last vector is another beginning's as well.

    So it is without positions: attention gives the last token of "a b c" and of "b a c" the same vector.
    """
    ends: dict[Text, int] = {}
    bars: dict[Text, float] = {}
    vectors: dict[Text, Tensor] = {}  # of the last token of each beginning
    for length in {len(text.tokens) for text in texts}:
        same = [text.tokens for text in texts if len(text.tokens) == length]
        ids = torch.tensor(same, device=level.span.right.device)
        told, reached, seen = level.told(ids)
        ends |= zip(same, told.tolist())
        bars |= zip(same, reached.tolist())
        for tokens, row in zip(same, seen):
            vectors |= {tokens[: place + 1]: vector for place, vector in enumerate(row)}
    if len(vectors) > MOST_BEGINNINGS:
        return texts
    beginnings = list(vectors)
    every = torch.stack(list(vectors.values())) if vectors else torch.zeros(0, 0)
    marked = []
    for text in texts:
        own = vectors[text.tokens]
        near = (every - own).norm(dim=1) <= bars[text.tokens] * own.norm()
        shared = any(beginnings[place] != text.tokens for place in near.nonzero().flatten().tolist() if len(beginnings[place]) > 0)
        marked.append(replace(text, told=ends[text.tokens], shared=shared))
    return marked


def _without_idle_runs(texts: list[FoundText], batch_size: int | None) -> list[FoundText]:
    """The texts without those that repeat a vector of theirs to the end where another text begins like the part that is told.

    Texts of such an end stay as guesses where the others are fewer than the batch.
    """
    idle = [
        _ends_idly(text) and any(other is not text and not _ends_idly(other) and _begins(other, text) for other in texts) for text in texts
    ]
    if batch_size is not None and len(texts) - sum(idle) < batch_size:
        return texts
    return [text for text, drop in zip(texts, idle) if not drop]


def _ends_idly(text: FoundText) -> bool:
    return text.told is not None and text.told < len(text.tokens)


def _begins(other: FoundText, text: FoundText) -> bool:
    return other.tokens[: text.told] == text.tokens[: text.told]


def _nearest_of_their_step(each: Tensor, count: int) -> Tensor:
    """Which of `count` tokens behind each unfinished text are nearly as near as the nearest one that is best seen at the same step.

    `each` (n, models) are the ratios of the tokens. Two texts may begin alike and enter the update at different steps: there the one
    that drifted less does not rule out the other. What is within an error bar stays in any case.
    """
    far, step = each.min(1)
    group = torch.arange(len(each)) // count * each.shape[1] + step
    nearest = torch.full((len(each) // count * each.shape[1],), torch.inf, dtype=far.dtype).scatter_reduce(0, group, far, "amin")
    return far <= (NEARLY * nearest[group]).clamp_min(SEEN)


def search(level: Level, choices: list[Tensor], batch_size: int | None, *, shorter: bool, tries: int, rng: Generator) -> FoundTexts:
    """Texts of an encoder, whose vectors depend on all tokens: for one anchor token, place by place the token that brings it nearest.

    Ours, in place of the paper's enumeration. The anchor's vector is a sum over the places, so that each wrong token adds to its
    distance from the span by itself, and a few sweeps find the text. An anchor is a place with about as many tokens as there are
    texts. `shorter` texts than the longest are tried where fewer than the declared number are found. The search ends after as many
    `tries` of a text.
    """
    length = max((place + 1 for place, tokens in enumerate(choices) if len(tokens)), default=0)
    wanted = batch_size or max((len(tokens) for tokens in choices), default=0)
    found: dict[Text, FoundText] = {}
    for cut in range(length, 0 if shorter else length - 1, -1):
        if not all(len(tokens) for tokens in choices[:cut]):
            continue  # a place in the middle shows no token, so that no whole text can be tried
        places = sorted(range(cut), key=lambda place: (abs(len(choices[place]) - wanted), place))
        for anchor, restart in ((anchor, restart) for anchor in places[:ANCHORS] for restart in range(RESTARTS)):
            passing = [text for text in found.values() if text.passes]
            if len(passing) >= wanted or tries <= 0:
                surest = _surest(list(found.values()), wanted)
                return replace(_with_margins(level, choices, surest, rng), cut=len(passing) < wanted)
            left = _unexplained(choices[:cut], passing)
            fresh = left if restart % 2 == 0 else choices[:cut]
            tries -= len(left[anchor]) * sum(map(len, fresh)) * SWEEPS
            for text in _descend(level, fresh, anchor, left[anchor], rng):
                found[text.tokens] = text
    return _with_margins(level, choices, _surest(list(found.values()), batch_size), rng)


def _with_margins(level: Level, choices: list[Tensor], texts: list[FoundText], rng: Generator) -> FoundTexts:
    """The texts of an encoder, each with how near the texts come that differ from it in one token or have two tokens exchanged.

    An encoder's vectors hold the tokens of all places in one sum. So where noise makes the error bars long, such texts pass as well.
    """
    seen = [replace(text, margin=_margin(level, choices, text, rng)) if text.passes else text for text in _told(level, texts)]
    return FoundTexts(seen, float("inf"))


def _margin(level: Level, choices: list[Tensor], text: FoundText, rng: Generator) -> float:
    own = torch.tensor(text.tokens, device=choices[0].device)
    tried = []
    for place, tokens in enumerate(choices[: len(own)]):
        others = tokens[tokens != own[place]]
        tried.append(own.repeat(len(others), 1))
        tried[-1][:, place] = others
    pairs = torch.combinations(torch.arange(len(own), device=own.device))
    pairs = pairs[(own[pairs[:, 0]] != own[pairs[:, 1]])] if len(pairs) else pairs.reshape(0, 2)
    pairs = pairs[torch.randperm(len(pairs), generator=rng, device=rng.device)[:MOST_EXCHANGES].to(pairs.device)]
    exchanged = own.repeat(len(pairs), 1).scatter(1, pairs, own[pairs.flip(1)])
    tried = torch.cat([*tried, exchanged])
    return float(level.ratios(tried).amax(1).min()) / PASS if len(tried) else float("inf")


def _unexplained(choices: list[Tensor], found: list[FoundText]) -> list[Tensor]:
    """The tokens of each place that no text found so far has there; all where every one has a text."""
    left = []
    for place, tokens in enumerate(choices):
        used = torch.tensor([text.tokens[place] for text in found if len(text.tokens) > place], dtype=torch.int64, device=tokens.device)
        rest = tokens[~torch.isin(tokens, used)]
        left.append(rest if len(rest) else tokens)
    return left


def _surest(texts: list[FoundText], count: int | None) -> list[FoundText]:
    """The surest texts, no text twice; of more than `count`, first those that are mostly new beside the surer ones."""
    ordered = sorted({text.tokens: text for text in texts}.values(), key=lambda text: text.ratio)
    if count is None or len(ordered) <= count:
        return ordered
    covered: set[tuple[int, int]] = set()
    new, variants = [], []
    for text in ordered:
        pairs = set(enumerate(text.tokens))
        mostly_new = 2 * len(pairs - covered) >= len(pairs)
        (new if mostly_new else variants).append(text)
        covered |= pairs if mostly_new else set()
    return (new + variants)[:count]


def _descend(level: Level, choices: list[Tensor], anchor: int, tokens: Tensor, rng: Generator) -> list[FoundText]:
    """One text for each of the anchor's tokens (n,): sweeps over the places, first by the anchor's distance, then by that of all."""

    def draw(place: int) -> Tensor:
        chosen = torch.randint(len(choices[place]), (len(tokens),), generator=rng, device=rng.device)
        return choices[place][chosen.to(choices[place].device)]

    ids = torch.stack([draw(place) for place in range(len(choices))], 1)  # (n, t)
    ids[:, anchor] = tokens
    for sweep in range(SWEEPS):
        before = ids.clone()
        for place in torch.randperm(len(choices), generator=rng, device=rng.device).tolist():
            count = len(choices[place])
            if place == anchor or count == 1:
                continue
            tried = ids.repeat_interleave(count, 0)
            tried[:, place] = choices[place].repeat(len(ids))
            watched = [anchor] if sweep < SWEEPS // 2 else range(len(choices))
            far = level.distances(tried, watched)[0].square().sum(1).reshape(len(ids), count)
            ids[:, place] = choices[place][far.argmin(1)]
        if sweep and torch.equal(ids, before):
            break
    ratios = level.ratios(ids).amax(1)
    return [FoundText(tuple(row), far) for row, far in zip(ids.tolist(), ratios.tolist())]
