"""Tokens: which words and pieces of words a client's texts hold, and in which order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from dosimeter.interfaces import Exposure, Metric
from dosimeter.metrics.texts import NO_TOKEN, ngram_overlap
from dosimeter.metrics.token_f1 import TokenF1
from dosimeter.network.token_inputs import are_tokens, texts_of_batch
from dosimeter.numbers import percent
from dosimeter.randomness import generator
from dosimeter.registry import TOKENS
from dosimeter.surfaces.luck import LARGEST_CHANCE, correct_for_attempts, luck_words
from dosimeter.surfaces.scores import Comparison, Scores, Values, choose_metrics, compare_samples, no_foreign_null, number
from dosimeter.surfaces.surface import SURFACES, Surface
from dosimeter.surfaces.verdicts import Verdict
from dosimeter.types import Batch, Evidence, NamedInputs, TokenEstimate

GUESSED_BATCHES = 1000  # batches of tokens drawn for the null
MARGIN = 0.1  # by which the F1 of a token set that is not certified must exceed each null's
OF_TEXTS = "rouge1"  # the metric of single texts, where the headline is of the batch's set
SHOWN_TEXTS = 16  # in a record
SHOWN_TOKENS = 64  # of one text, or of the set
Text = tuple[int, ...]


@SURFACES.register("tokens")
class Tokens(Surface[TokenEstimate]):
    """The words of a client's texts."""

    position = 50
    reads = ("texts", "positions")
    estimate = TokenEstimate
    methods = TOKENS
    key = plural = "tokens"
    headline = "token_f1"
    also_plotted = ("token_recall", OF_TEXTS)
    plot = "shares"
    per_sample = False
    takes_labels = False
    grid_methods: ClassVar = {"embedding_rows": {}}

    description = (
        "Which words, and pieces of words, the client’s texts hold, and where a method tells, in which order. "
        "A single rare word, such as a name, can be the secret."
    )
    if_leaked = "The server can tell words of this client’s private texts from one update."
    if_not_shown = "What was tried here told no more words than guessing common ones. That is no proof of safety."
    null_words: ClassVar = {
        "unigram": ("common words", "tokens drawn by how common each one is in texts that the server already had, many times over"),
        "foreign": ("foreign gradient", "the same method fed another client’s update: what it invents by itself"),
    }
    without_ceiling = "no bound on sets of tokens is built in; behind differential privacy, membership of one text has one"
    headline_covers = "the set of tokens"
    share_words = "how far recovery is from guessing to perfect"
    counting_words = "Tokens count as leaked if some are certified, or if the set of them is closer to the truth than guessing explains."

    def score(self, found: TokenEstimate, comparison: Comparison) -> Scores:
        return score_tokens(found, comparison)

    def judge(self, found: TokenEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
        return judge_tokens(found, scores, attempts)

    def beats_nulls(self, value: float | None, rivals: Values) -> bool:
        return number(value, 0.0) >= max((number(rival, 0.0) for rival in rivals), default=0.0) + MARGIN

    def evidence_metric(self, metrics: Mapping[str, Any]) -> str:
        return OF_TEXTS if OF_TEXTS in metrics else self.headline

    def proves(self, found: TokenEstimate) -> bool:
        return bool(found.certified) or found.complete or any(found.certified_sequences)

    def proved_samples(self, found: TokenEstimate, scores: Scores) -> list[bool]:
        return [found.complete and found.certified == set(found.tokens)]

    def without_proof(self, found: TokenEstimate, message: str) -> TokenEstimate:
        unproved = tuple(False for _ in found.sequences)
        return replace(found, certified=frozenset(), complete=False, certified_sequences=unproved, premises=(), message=message)

    def count_guesses(self, found: TokenEstimate) -> int:
        return len(found.sequences)

    def details(self, found: TokenEstimate, exposure: Exposure, truth: Batch) -> dict[str, Any]:
        return {
            **found.details,
            "tokens": len(found.tokens),
            "certified": len(found.certified),
            "complete": found.complete,
            "sequences": len(found.sequences),
            "certified_sequences": sum(found.certified_sequences),
        }

    def facts(self, details: Mapping[str, Any]) -> list[str]:
        facts = []
        certified, false = details.get("certified"), details.get("false_certificates")
        if isinstance(certified, int):
            facts.append(f"{certified} of {details.get('tokens')} tokens certified" + (f", {false} of them wrongly" if false else ""))
        if details.get("complete"):
            facts.append("certified: no other token leaves a trace in the update")
        if details.get("sequences"):
            facts.append(f"{details['sequences']} texts in order, {details.get('certified_sequences')} of them certified")
        return facts

    def evidence(self, found: TokenEstimate, comparison: Comparison | None = None, scores: Scores | None = None) -> list[Evidence]:
        """Each private text beside the recovered one, as ids; the set of tokens where no text was recovered."""
        texts = [] if comparison is None else private_texts(comparison.truth)
        if isinstance(columns := found.details.get("columns"), Mapping):
            return [_categories(columns, texts)]
        if not found.sequences:
            private = _words(sorted({token for text in texts for token in text})) if texts else None
            return [Evidence(kind="text", private=private, recovered=_words(sorted(found.tokens)), caption="the set of token ids")]
        if comparison is None or scores is None or scores.assignment is None:
            return [Evidence(kind="text", recovered=_words(text), sample=i) for i, text in enumerate(found.sequences[:SHOWN_TEXTS])]
        matched = [found.sequences[partner] if partner >= 0 else None for partner in scores.assignment.tolist()]
        values = scores[OF_TEXTS].tolist() if OF_TEXTS in scores else [None] * len(texts)
        return [
            Evidence(kind="text", private=_words(text), recovered=None if mine is None else _words(mine), sample=i, score=value)
            for i, (text, mine, value) in enumerate(zip(texts[:SHOWN_TEXTS], matched, values))
        ]

    def share(self, record: Any) -> float:
        """The F1 of the token set, between guessing (0) and perfect (1)."""
        if not record.metrics:
            return 0.0
        guessed = record.nulls["unigram"]["token_f1"][0] or 0.0
        return max(0.0, ((record.metrics["token_f1"][0] or 0.0) - guessed) / (1 - guessed)) if guessed < 1 else 0.0


def _categories(columns: Mapping[str, Sequence[int]], texts: Sequence[Text]) -> Evidence:
    """The categories of each column of a table, as ids."""
    private = {f"column {name}": _words(sorted({text[int(name) - 1] for text in texts})) for name in columns} if texts else None
    recovered = {f"column {name}": _words(ids) for name, ids in columns.items()}
    return Evidence(kind="table", private=private, recovered=recovered, caption="the categories that occur, as ids")


def _words(tokens: Sequence[int]) -> str:
    """Token ids as a line; the tokenizer is the client's own."""
    shown = " ".join(map(str, tokens[:SHOWN_TOKENS]))
    return f"{shown} … and {len(tokens) - SHOWN_TOKENS} more" if len(tokens) > SHOWN_TOKENS else shown


def private_texts(batch: Batch) -> list[Text]:
    """The texts of a batch, without positions that its attention mask hides."""
    if not are_tokens(batch.inputs):
        raise ValueError("truth.inputs: expected token ids (B, T), since what was recovered are tokens")
    return texts_of_batch(batch)


def score_tokens(found: TokenEstimate, comparison: Comparison) -> Scores:
    """Compare the set of tokens, and where there are sequences, each text with the recovered one that is closest."""
    texts = private_texts(comparison.truth)
    known = [] if comparison.auxiliary is None else private_texts(comparison.auxiliary)
    foreign: TokenEstimate | None = comparison.foreign
    estimates = [one for one in (found, foreign) if one is not None]
    ids = [token for text in (*texts, *known) for token in text] + [token for one in estimates for token in one.tokens]
    width = max([*ids, comparison.classes or 0, int(found.details.get("vocabulary", 0)) - 1], default=0) + 1
    wanted = _members({token for text in texts for token in text}, width)  # (V,)
    usable, unavailable = choose_metrics(comparison.metrics, "tokens", None)
    usable = {name: metric for name, metric in usable.items() if metric.per_batch or found.sequences}
    prior = torch.full((width,), 1 / width, dtype=torch.float64)
    if known:
        common = torch.bincount(torch.tensor([token for text in known for token in text]), minlength=width).double()
        prior = 0.99 * common / common.sum() + 0.01 * prior  # a token that the known texts lack has a chance too
    drawn = _draw_sets(prior, texts)  # (N, V)
    columns, assignment = _values(usable, found.tokens, found.sequences, wanted, texts)
    nulls = {"unigram": _guess_values(usable, drawn, prior, wanted, texts)}
    if foreign is not None:
        nulls["foreign"] = _values(usable, foreign.tokens, foreign.sequences, wanted, texts)[0]
    details: dict[str, Any] = {"chance": _chance(_members(found.tokens, width), wanted, drawn)}
    replaced = comparison.exposure is not None and any(defense.replaces for defense in comparison.exposure.public.defenses)
    if not replaced:
        whole = comparison.truth.inputs  # a position that the mask hides is private too, and may leave a trace
        rows = (whole.main if isinstance(whole, NamedInputs) else whole).tolist()
        details["false_certificates"] = false_certificates(found, [tuple(row) for row in rows])
    return Scores(surface="tokens", per_metric=columns, nulls=nulls, assignment=assignment, unavailable=unavailable, details=details)


def false_certificates(found: TokenEstimate, texts: Sequence[Text]) -> int:
    """How many certified tokens and texts the truth refutes."""
    occurring = {token for text in texts for token in text}
    false = len(found.certified - occurring)
    proved = [text for text, sure in zip(found.sequences, found.certified_sequences) if sure]
    return false + sum(not any(text == true[: len(text)] for true in texts) for text in proved)


def judge_tokens(found: TokenEstimate, scores: Scores, attempts: int) -> tuple[Verdict, str]:
    """Tokens leaked where some are certified, or where the set beats every null and luck is refuted.

    A certificate that the truth refutes takes the verdict away. Without the null of a foreign gradient nothing counts as leaked that
    is not certified.
    """
    metrics, nulls = scores.as_lists()
    reached = number(metrics["token_f1"][0])
    recall, precision = (number(metrics[name][0]) for name in ("token_recall", "token_precision"))
    share = f"{percent(recall)} of the batch's tokens recovered, {percent(precision)} of those listed are right"
    if OF_TEXTS in metrics:
        scored = [number(value, 0.0) for value in metrics[OF_TEXTS]]
        share += f"; as single texts ROUGE-1 {percent(sum(scored) / len(scored))} on average"
    if refuted := scores.details.get("false_certificates", 0):
        return Verdict.NOT_SHOWN, f"{share}; {refuted} certificates are refuted by the truth: do not trust this run, and report it"
    if found.certified:
        whole = ", and that there is no other" if found.complete else ""
        return Verdict.LEAKED, f"{share}; {len(found.certified)} tokens certified from the gradient alone{whole}"
    rivals = {name: number(columns["token_f1"][0], 0.0) for name, columns in nulls.items() if "token_f1" in columns}
    best = max(rivals.values(), default=0.0)
    figures = f"{share}; F1 {reached:.2f}, the best null has {best:.2f}"
    if not reached >= best + MARGIN:
        return Verdict.NOT_SHOWN, figures
    if "foreign" not in nulls:
        return Verdict.NOT_SHOWN, f"{figures}; {no_foreign_null(scores.details.get('refused_nulls'))}"
    chance = scores.details.get("chance", 1.0)
    luck = luck_words(chance, attempts)
    if correct_for_attempts(chance, attempts) <= LARGEST_CHANCE:
        return Verdict.LEAKED, f"{figures}; {luck}"
    return Verdict.NOT_SHOWN, f"{figures}; {luck}, so this batch does not tell a leak from luck"


def _members(tokens: Any, width: int) -> Tensor:
    """A set of token ids as (V,) bool."""
    members = torch.zeros(width, dtype=torch.bool)
    members[torch.tensor(sorted(tokens), dtype=torch.int64)] = True
    return members


def _values(
    metrics: Mapping[str, Metric], tokens: Any, sequences: Sequence[Text], wanted: Tensor, texts: Sequence[Text]
) -> tuple[dict[str, Tensor], Tensor | None]:
    """Every metric of an estimate, and which sequence belongs to which text (−1: none)."""
    members = _members(tokens, len(wanted))
    values = {name: metric(members, wanted) for name, metric in metrics.items() if metric.per_batch}
    by_text = {name: metric for name, metric in metrics.items() if not metric.per_batch}
    if not by_text:
        return values, None
    assignment = assign_texts(sequences, texts)
    longest = max((len(text) for text in (*sequences, *texts)), default=0)
    mine, true = _padded(sequences, longest), _padded(texts, longest)
    return values | compare_samples(by_text, mine, true, assignment), assignment


def assign_texts(recovered: Sequence[Text], texts: Sequence[Text]) -> Tensor:
    """The one-to-one matching with the most tokens in common (ROUGE-1, then ROUGE-2): (B,) index or −1."""
    assignment = torch.full((len(texts),), -1, dtype=torch.int64)
    if recovered:
        gain = [[ngram_overlap(mine, true, 1) + 0.1 * ngram_overlap(mine, true, 2) for true in texts] for mine in recovered]
        rows, columns = linear_sum_assignment(torch.tensor(gain).numpy(), maximize=True)
        assignment[torch.from_numpy(columns)] = torch.from_numpy(rows)
    return assignment


def _padded(texts: Sequence[Text], length: int) -> Tensor:
    """(n, length), with `NO_TOKEN` behind the end of each text."""
    return torch.tensor([[*text, *[NO_TOKEN] * (length - len(text))] for text in texts], dtype=torch.int64).reshape(-1, length)


def _draw_sets(prior: Tensor, texts: Sequence[Text]) -> Tensor:
    """The token sets of batches as long as the private one, drawn by how common tokens are, the same in every run: (N, V) bool."""
    draws = max(100, min(GUESSED_BATCHES, 2**26 // len(prior)))
    ids = torch.multinomial(prior, draws * sum(map(len, texts)), replacement=True, generator=generator(0, "token guesses"))
    sets = torch.zeros(draws, len(prior), dtype=torch.bool)
    return sets.scatter_(1, ids.reshape(draws, -1), True)


def _guess_values(metrics: Mapping[str, Metric], drawn: Tensor, prior: Tensor, wanted: Tensor, texts: Sequence[Text]) -> dict[str, Tensor]:
    """What texts of tokens drawn by how common they are get, on average."""
    values = {name: metric(drawn, wanted.expand_as(drawn)).mean(0, keepdim=True) for name, metric in metrics.items() if metric.per_batch}
    by_text = {name: metric for name, metric in metrics.items() if not metric.per_batch}
    if by_text:
        rng = generator(0, "text guesses")
        guesses = [tuple(torch.multinomial(prior, max(len(text), 1), replacement=True, generator=rng).tolist()) for text in texts]
        values |= _values(by_text, (), guesses, wanted, texts)[0]
    return values


def _chance(found: Tensor, wanted: Tensor, drawn: Tensor) -> float:
    """The probability that the estimate agrees as well with a batch drawn by how common tokens are: (k + 1)/(N + 1)."""
    metric = TokenF1()
    reached = metric(found, wanted) - 1e-12
    as_good = metric(found.expand_as(drawn), drawn) >= reached
    return (int(as_good.sum()) + 1) / (len(drawn) + 1)
