"""Models that look up other tokens than those of their texts: no row that the model touches itself is taken for a token."""

import pytest
import torch
from torch import nn

import dosimeter as dm

VOCABULARY, WIDTH, LENGTH = 60, 16, 5
BEGINS = 7


class Reader(nn.Module):
    def __init__(self, how: str, *, tied: bool = False) -> None:
        super().__init__()
        self.how, self.tied = how, tied
        self.tokens, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY if tied else 3)
        self.hidden = nn.Linear(WIDTH, WIDTH)

    def forward(self, ids):
        hidden = self.hidden(self.vectors(ids)).tanh()
        return hidden @ self.tokens.weight.T if self.tied else self.head(hidden.mean(1))

    def vectors(self, ids):
        first = torch.full_like(ids[:, :1], BEGINS)
        match self.how:
            case "a second call":
                return torch.cat([self.tokens(first), self.tokens(ids)[:, 1:]], 1)
            case "moved":
                return self.tokens(ids) + self.tokens(torch.cat([first, ids[:, :-1]], 1))
            case "the weight":
                return self.tokens(ids) + self.tokens.weight[BEGINS]
            case "hashed":
                return self.tokens(ids % 30)
            case "rare":
                return self.tokens(ids.where(ids < 55, 3))
            case "dropped":
                return self.tokens(ids.where(torch.rand(ids.shape) > 0.1, 3) if self.training else ids)
        return self.tokens(ids)


def found_in(how, texts, *, tied=False):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Reader(how, tied=tied)
    targets = texts.roll(-1, 1) if tied else torch.arange(len(texts)) % 3
    return dm.recover_tokens(dm.observe(model, dm.Batch(texts, targets)), "embedding_rows")


def texts_of(seed):
    """Texts of high ids, without the token that the model begins with."""
    return torch.randint(30, VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("how", ["a second call", "moved", "the weight"])
def test_a_token_that_the_model_adds_is_not_listed_and_the_others_are_proved(how):
    texts = texts_of(5)
    found = found_in(how, texts)
    seen = set(texts[:, 1:].flatten().tolist()) if how == "a second call" else set(texts.flatten().tolist())
    assert seen <= found.tokens == found.certified <= set(texts.flatten().tolist())
    assert not found.complete
    assert "looks up token 7" in found.message


@pytest.mark.parametrize("how", ["hashed", "rare", "dropped"])
def test_tokens_in_place_of_others_prove_nothing(how):
    found = found_in(how, texts_of(6))
    assert not found.certified
    assert not found.complete
    assert "guesses only: the model" in found.message


def test_a_tied_head_beside_a_token_that_the_model_adds():
    texts = texts_of(7)
    found = found_in("moved", texts, tied=True)
    assert BEGINS not in found.tokens
    assert found.certified <= set(texts.flatten().tolist())


def test_a_plain_lookup_is_exact_and_complete():
    texts = texts_of(8)
    found = found_in("", texts)
    assert found.tokens == found.certified == set(texts.flatten().tolist())
    assert found.complete


class Encoder(nn.Module):
    """An encoder that drops words, or attention, at random without a layer that says so."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.tokens, self.head = how, nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, 3)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=0.3 * (how == "attention"), batch_first=True)

    def forward(self, ids):
        if self.how == "words" and self.training:
            ids = ids.where(torch.rand(ids.shape) > 0.1, 3)
        vectors = self.tokens(ids)
        return self.head((vectors + self.attention(vectors, vectors, vectors, need_weights=False)[0]).mean(1))


@pytest.mark.parametrize("how", ["words", "attention"])
def test_dager_takes_no_model_that_draws_at_random(how):
    with torch.random.fork_rng():
        torch.manual_seed(1)
        model = Encoder(how).train()
    exposure = dm.observe(model, dm.Batch(texts_of(9), torch.arange(2)))
    with pytest.raises(dm.Refused, match="draws random numbers"):
        dm.recover_tokens(exposure, "dager")
    assert dm.recover_tokens(dm.observe(model.eval(), dm.Batch(texts_of(9), torch.arange(2))), "dager").tokens
